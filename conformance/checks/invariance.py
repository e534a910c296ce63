"""Does the answer stay the same, bit for bit, when what it must not depend on changes?

Rows that nobody may read are poisoned with +-1e30, one batch row and head is changed, the same call is repeated; each
element that none of it may reach must not move. In a call that is repeated -0 is not 0. Elsewhere it is: a right kernel
multiplies a poisoned row by a probability of 0, and -1e30 times 0 is -0, to which the sum of a row of zeros may turn.
May touch: evidence, poison, findings.
Tests: tests/conformance/test_checks_invariance.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from conformance.checks.compare import compare
from conformance.checks.other_problems import judge_programs
from conformance.checks.outcome import Outcome
from conformance.checks.words import place, relation, segment_ids_of
from conformance.evidence import Evidence
from conformance.finding import Finding
from conformance.poison import poisoned_keys, poisoned_queries, touched, visible
from conformance.problem import Case
from conformance.variants import VARIANTS, changed_part, variants_of

NAME = "invariance"
TENSORS = ("out", "lse", "dquery", "dkey", "dvalue", "dsinks")

_MOVES = {
    "poisoned_keys": "moves with keys that it must not see",
    "poisoned_queries": "moves with queries that it must not see",
    "changed": "moves with another batch row or head",
    "lse_alone": "moves with its cotangents",
    "again": "differs when the same call is repeated",
}
_NOT_ZERO = "is not zero where its cotangents are"
_NOT_ATTENTION = "of attention_with_lse is not attention's where the cotangent of lse is zero"
_OF_LSE_ALONE = "is wrong where the cotangent of out is zero"
_OF_KEYS = ("dkey", "dvalue")

Fixed = Mapping[str, np.ndarray]
"""By tensor: bool, which elements must not move: [batch, seq, heads], or [heads] for dsinks."""


def designates(case: Case) -> bool:
    """Whether the case has any variant of this check."""
    return bool(variants_of(case, (NAME,)))


def check(evidence: Evidence) -> Outcome:
    """Compares every variant's outputs with those of data draw 0; one finding a tensor.

    The last variant comes first: an answer that is another one each time moves with everything.
    """
    shares: dict[str, float] = {}
    findings: dict[str, Finding] = {}
    for variant in reversed(evidence.variants):
        if VARIANTS[variant].check != NAME:
            continue
        for looked in _looked_at(evidence, variant):
            tensor = looked.tensor
            shares[tensor] = max(shares.get(tensor, 0.0), 0.0 if looked.holds else np.inf)
            if not looked.holds and tensor not in findings:
                findings[tensor] = _finding(evidence, variant, looked)
    other = judge_programs(evidence, NAME)
    kept = [found for found in other.findings if found.tensor not in findings]
    return Outcome({**other.shares, **shares}, (*findings.values(), *kept))


@dataclass(frozen=True)
class _Looked:
    """One array of a variant: what was asked, what it should be, and where (in position order) it is not that."""

    call: str
    tensor: str
    signature: str
    expected: np.ndarray
    got: np.ndarray
    wrong: np.ndarray

    @property
    def holds(self) -> bool:
        return not self.wrong.any()


def _looked_at(evidence: Evidence, variant: str) -> Iterator[_Looked]:
    fixed = _fixed(evidence, variant)
    for name in evidence.arrays:
        prefix, call, full = name.split("/")
        if prefix != variant:
            continue
        tensor = full.removesuffix(" of vjp")
        got, base = (evidence.in_position_order(f"{data}/{call}/{full}") for data in (variant, "0"))
        same = (got == base) | ((got != got) & (base != base))
        if variant == "again":
            same &= (np.signbit(got) == np.signbit(base)) | (got != got)
        if variant == "changed" and tensor.startswith("d"):
            yield from _with_zero_cotangents(evidence, call, tensor, got)
            if call == "attention_with_lse":
                continue  # draw 0 has a cotangent of lse, and `changed` has none
        if variant == "lse_alone" and tensor.startswith("d"):
            yield _of_lse_alone(evidence, call, tensor, got)
            continue
        must = np.broadcast_to(_spread(fixed[tensor], got), got.shape)
        if must.any():
            yield _Looked(call, tensor, _MOVES[variant], base, got, must & ~same)


def _of_lse_alone(evidence: Evidence, call: str, tensor: str, got: np.ndarray) -> _Looked:
    """Gradients are linear in the cotangents: what lse alone gives is what both give without what out gives."""
    if call == "attention":
        return _Looked(call, tensor, _NOT_ZERO, np.zeros_like(got), got, _not_zero(evidence, call, tensor, got))
    both, of_out = evidence.answer(0, call), evidence.answer(0, "attention")
    reference = both.reference[tensor] - of_out.reference[tensor]
    found = compare(got, reference, both.allowance[tensor] + of_out.allowance[tensor], None)
    return _Looked(call, tensor, _OF_LSE_ALONE, reference, got, ~(found.shares <= 1))


def _not_zero(evidence: Evidence, call: str, tensor: str, got: np.ndarray) -> np.ndarray:
    """Where it is not; but what is not finite whatever the data is not of this check."""
    return (got != 0) & ~(np.isnan(got) & np.isnan(evidence.in_position_order(f"0/{call}/{tensor}")))


def _with_zero_cotangents(evidence: Evidence, call: str, tensor: str, got: np.ndarray) -> Iterator[_Looked]:
    """The variant `changed` has dout 0 in its changed part, and dlse 0 everywhere."""
    zero = _by_tensor(evidence.case, changed_part(evidence.case))[tensor]
    fixed = _fixed(evidence, "changed")[tensor]
    where = np.broadcast_to(_spread(zero, got), got.shape)
    if where.any():
        wrong = where & _not_zero(evidence, call, tensor, got)
        yield _Looked(call, tensor, _NOT_ZERO, np.zeros_like(got), got, wrong)
    if call == "attention_with_lse" and fixed.any():
        answer = evidence.answer(0, "attention")
        reference, allowance = answer.reference[tensor], answer.allowance[tensor]
        must = np.broadcast_to(_spread(fixed, got), got.shape)
        found = compare(np.where(must, got, reference), reference, allowance, None)
        yield _Looked(call, tensor, _NOT_ATTENTION, reference, got, must & (found.shares > 1))


def _fixed(evidence: Evidence, variant: str) -> Fixed:
    """What must not move; out and lse of a row without keys may, where the target leaves them undefined."""
    case = evidence.case
    if variant in ("again", "lse_alone"):
        fixed = _by_tensor(case, np.ones((case.problem.batch, case.problem.num_query_heads), bool))
    elif variant == "changed":
        fixed = _by_tensor(case, ~changed_part(case))
    else:
        fixed = _out_of_reach(case, variant)
    if case.problem.padding is None or evidence.target.empty_rows == "zero":
        return fixed
    is_token = (segment_ids_of(case) != case.problem.padding)[:, :, None]
    return {**fixed, "out": fixed["out"] & is_token, "lse": fixed["lse"] & is_token}


def _by_tensor(case: Case, rows: np.ndarray) -> Fixed:
    """From batch rows and query heads [batch, num_query_heads] to every tensor's elements.

    Those of a kv head count where all its query heads do; those of dsinks where all batch rows do.
    """
    problem = case.problem
    queries = np.repeat(rows[:, None], problem.seq_len, axis=1)
    keys = np.all(queries.reshape(problem.batch, problem.seq_len, problem.num_kv_heads, -1), axis=3)
    return {
        **dict.fromkeys(("out", "lse", "dquery"), queries),
        **dict.fromkeys(_OF_KEYS, keys),
        "dsinks": np.all(rows, axis=0),
    }


def _out_of_reach(case: Case, variant: str) -> Fixed:
    """Elements that no poisoned row reaches.

    A poisoned key moves the queries that see it, and through their softmax the gradient of every key that those see. A
    poisoned query moves itself and the gradient of the keys that it sees.
    """
    sees = visible(case)
    of_keys = variant == "poisoned_keys"
    queries = touched(poisoned_keys(case), sees) if of_keys else poisoned_queries(case)
    keys = touched(queries, sees.swapaxes(1, 2))
    group = case.problem.num_query_heads // case.problem.num_kv_heads
    by_query_head = np.repeat(queries, group, axis=2)
    return {
        **dict.fromkeys(("out", "lse", "dquery"), ~by_query_head),
        **dict.fromkeys(_OF_KEYS, ~keys),
        "dsinks": np.all(~by_query_head, axis=(0, 1)),
    }


def _spread(fixed: np.ndarray, array: np.ndarray) -> np.ndarray:
    """With a feature axis where the tensor has one."""
    return fixed[..., None] if array.ndim > fixed.ndim else fixed


def _finding(evidence: Evidence, variant: str, moved: _Looked) -> Finding:
    case = evidence.case
    index = tuple(int(i) for i in np.argwhere(moved.wrong)[0])
    expected, got = float(moved.expected[index]), float(moved.got[index])
    names = ("batch row", "position", "head", "feature")[: len(index)] if len(index) > 1 else ("head",)
    where = ", ".join(f"{name} {i}" for name, i in zip(names, index, strict=True))
    reading = f"{moved.tensor} {moved.signature}: at {where} it is {got:.6g}, expected {expected:.6g}"
    reading += f"; {int(moved.wrong.sum())} of {moved.wrong.size} elements are wrong"
    if len(index) > 1:
        reading += f"; {place(case, index[1])}{_nearest_poison(case, variant, moved.tensor, index)}"
    return Finding(
        target=evidence.target.name,
        check=NAME,
        tensor=moved.tensor,
        signature=moved.signature,
        case=evidence.case_text,
        reading=reading,
        draw=0,
        rank=case.problem.rank_of(index[1]) if len(index) > 1 else None,
        index=index,
        expected=expected,
        got=got,
        allowance=None if moved.signature in (_NOT_ATTENTION, _OF_LSE_ALONE) else 0.0,
        share=np.inf,
        detail=f"in {moved.call}, variant {variant}",
    )


def _nearest_poison(case: Case, variant: str, tensor: str, index: tuple[int, ...]) -> str:
    """The poisoned row next to the element, of its own batch row and kv head, and how the two lie."""
    if variant not in ("poisoned_keys", "poisoned_queries"):
        return ""
    batch_row, position, head = index[:3]
    if tensor not in _OF_KEYS:
        head //= case.problem.num_query_heads // case.problem.num_kv_heads
    poisoned = (poisoned_keys if variant == "poisoned_keys" else poisoned_queries)(case)[batch_row, :, head]
    if not poisoned.any():
        return "; nothing of its own batch row and head is poisoned"
    nearest = int(min(np.flatnonzero(poisoned), key=lambda other: abs(other - position)))
    if variant == "poisoned_keys":
        if tensor in _OF_KEYS:
            return f"; the nearest poisoned key is {nearest}"
        return f"; the nearest poisoned key, {nearest}, is {relation(case, batch_row, position, nearest)}"
    if tensor in _OF_KEYS:
        return f"; to the nearest poisoned query, {nearest}, it is {relation(case, batch_row, nearest, position)}"
    return f"; the nearest poisoned query is {nearest}"
