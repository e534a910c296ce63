"""One tensor of one target against the oracle, element by element: an element passes only if `error <= allowance`.

Shared by the checks of values (output, residuals, gradients). May touch: evidence, findings.
Tests: tests/conformance/test_checks_values.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.answers import Answer
from conformance.checks.outcome import Detail, Outcome
from conformance.evidence import Evidence
from conformance.finding import Finding
from conformance.inputs import NUM_DRAWS
from conformance.problem import Case


@dataclass(frozen=True)
class Comparison:
    """The worst element of one array: its index, what was expected and got, its allowance, error / allowance."""

    passes: bool
    share: float
    index: tuple[int, ...]
    expected: float
    got: float
    allowance: float
    shares: np.ndarray
    """The share of every element that was compared, in the array's shape."""


@dataclass(frozen=True)
class _Source:
    """Where an array came from, and how it compares."""

    draw: int
    call: str
    of_vjp: bool
    comparison: Comparison
    by_rank: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.call}, forward of its VJP" if self.of_vjp else self.call


def check_tensors(check: str, tensors: tuple[str, ...], evidence: Evidence) -> Outcome:
    """Compares every array the target gave for these tensors; one finding a tensor, at its worst element."""
    shares: dict[str, float] = {}
    findings: list[Finding] = []
    details: list[Detail] = []
    withheld: dict[str, str] = {}
    for tensor in tensors:
        for draw, call, _ in evidence.sources_of(tensor):
            if why := evidence.answer(draw, call).withheld.get(tensor):
                withheld[tensor] = why
        sources = [
            _source(evidence, draw, call, name, tensor)
            for draw, call, name in evidence.sources_of(tensor)
            if tensor in evidence.answer(draw, call).reference
        ]
        if not sources:
            continue
        shares[tensor] = max(source.comparison.share for source in sources)
        if any(not source.comparison.passes for source in sources):
            findings.append(_finding(check, tensor, evidence, sources))
        details += [_detail(tensor, source) for source in sources]
    return Outcome(shares, tuple(findings), tuple(details), withheld=withheld)


def compare(got: np.ndarray, reference: np.ndarray, allowance: np.ndarray, compared: np.ndarray | None) -> Comparison:
    """Holds one array against the reference, in float64; NaN never passes, an equal infinity does.

    Where `compared` is False the element must be finite, or the reference's own infinity.

    Raises:
        ValueError: the shapes differ: NumPy would stretch one of them, and one number could pass for a whole array.
    """
    if not got.shape == reference.shape == allowance.shape:
        raise ValueError(f"shapes differ: got {got.shape}, reference {reference.shape}, allowance {allowance.shape}")
    got = got.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.where(got == reference, 0.0, np.abs(got - reference))
        passes = error <= allowance
        share = np.where(error == 0, 0.0, error / allowance)
    share = np.where(np.isnan(share), np.inf, share)
    if compared is not None:
        finite = np.isfinite(got) | (got == reference)
        passes = np.where(compared, passes, finite)
        share = np.where(compared, share, np.where(finite, 0.0, np.inf))
    # An element that fails outranks any that passes, whatever rounding says of its share.
    ranked = np.where(passes, share, np.maximum(share, np.nextafter(1.0, 2.0)))
    worst = tuple(int(i) for i in np.unravel_index(np.argmax(ranked), ranked.shape))
    return Comparison(
        passes=bool(passes.all()),
        share=float(ranked[worst]),
        index=worst,
        expected=float(reference[worst]),
        got=float(got[worst]),
        allowance=float(allowance[worst]),
        shares=ranked,
    )


def _source(evidence: Evidence, draw: int, call: str, name: str, tensor: str) -> _Source:
    answer: Answer = evidence.answer(draw, call)
    right = (answer.reference[tensor], answer.allowance[tensor], answer.compared.get(tensor))
    of_vjp = name.endswith(" of vjp")
    if not answer.places:
        found = compare(evidence.in_position_order(name), *right)
        if tensor == "dsinks":
            return _Source(draw, call, of_vjp, found, ())
        positions = np.arange(evidence.case.problem.seq_len)
        return _Source(draw, call, of_vjp, found, _by_rank(evidence, found.shares.swapaxes(0, 1), positions))
    places = answer.places[tensor]
    found = compare(evidence.at_places(name, places), *right)
    if tensor == "dsinks":
        return _Source(draw, call, of_vjp, of_the_whole(found, places), ())
    by_rank = _by_rank(evidence, found.shares, places[:, 1])
    return _Source(draw, call, of_vjp, of_the_whole(found, places), by_rank)


def of_the_whole(found: Comparison, places: np.ndarray) -> Comparison:
    """A comparison at `places` [n, …], with the index that its worst element has in the whole array."""
    row, *feature = found.index
    return dataclasses.replace(found, index=(*(int(i) for i in places[row]), *feature))


def _by_rank(evidence: Evidence, shares: np.ndarray, positions: np.ndarray) -> tuple[float, ...]:
    """The largest share on each rank; `shares` [n, …] are of rows at `positions` [n]."""
    problem = evidence.case.problem
    rank_of = np.argsort(problem.positions()) // (problem.seq_len // problem.context_parallelism)
    ranks = rank_of[positions]
    by_row = shares.reshape(len(shares), -1).max(axis=1)
    return tuple(float(by_row[ranks == rank].max(initial=0.0)) for rank in range(problem.context_parallelism))


def _detail(tensor: str, source: _Source) -> Detail:
    found = source.comparison
    return Detail(tensor, str(source), source.draw, found.share, found.index, found.expected, found.got, source.by_rank)


def _finding(check: str, tensor: str, evidence: Evidence, sources: list[_Source]) -> Finding:
    failing = [source for source in sources if not source.comparison.passes]
    worst = max(failing, key=lambda source: source.comparison.share)
    found = worst.comparison
    what = "exceeds its allowance" if np.isfinite(found.got) else "is not finite"
    only = _only_where(failing, sources)
    return Finding(
        target=evidence.target.name,
        check=check,
        tensor=tensor,
        signature=f"{what}{only}",
        case=evidence.case_text,
        reading=f"{tensor} {what}{only}: {sentence(evidence.case, found)}",
        draw=worst.draw,
        **element(evidence.case, found),
        detail=f"in {worst.call}, {'the forward of its VJP' if worst.of_vjp else tensor}, data draw {worst.draw}",
    )


def _only_where(failing: list[_Source], sources: list[_Source]) -> str:
    """What the failing arrays have in common that the passing ones have not: part of the kind of a finding."""
    passing = [source for source in sources if source.comparison.passes]
    for words, belongs in (
        (f", on data draw {NUM_DRAWS - 1} only", lambda source: source.draw == NUM_DRAWS - 1),
        (", in the primal call only", lambda source: not source.of_vjp),
        (", in the VJP's forward only", lambda source: source.of_vjp),
        (", in attention only", lambda source: source.call == "attention"),
        (", in attention_with_lse only", lambda source: source.call == "attention_with_lse"),
    ):
        if passing and all(map(belongs, failing)) and not any(map(belongs, passing)):
            return words
    return ""


def element(case: Case, found: Comparison) -> dict[str, Any]:
    """The fields of a finding that say where its worst element is, what it should be, and what it is."""
    return {
        "rank": case.problem.rank_of(found.index[1]) if len(found.index) > 1 else None,
        "index": found.index,
        "expected": found.expected,
        "got": found.got,
        "allowance": found.allowance,
        "share": found.share,
    }


def sentence(case: Case, found: Comparison) -> str:
    """The worst element in plain words, and what stands near it."""
    has_rows = len(found.index) > 1
    names = ("batch row", "position", "head", "feature")[: len(found.index)] if has_rows else ("head",)
    place = ", ".join(f"{name} {i}" for name, i in zip(names, found.index, strict=True))
    words = (
        f"at {place} it is {found.got:.6g}, expected {found.expected:.6g}, {found.share:.3g} times what rounding allows"
    )
    if not has_rows:
        return words
    problem, position = case.problem, found.index[1]
    words += f"; rank {problem.rank_of(position)} of {problem.context_parallelism}"
    if problem.layout == "striped":
        return words
    chunk, offset = divmod(position, problem.chunk_len)
    return f"{words}, row {offset} of {problem.chunk_len} in chunk {chunk}"
