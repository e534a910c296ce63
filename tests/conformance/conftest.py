"""What the tests of the harness share: where the adapters are, small cases of the list, evidence with right answers.

May touch: conformance and the oracle; JAX never, so that a test of plain data starts at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oracle
from conformance.answers import answer_for
from conformance.case_list import case_list
from conformance.case_text import parse_case
from conformance.checks import CHECKS, Outcome
from conformance.empty_rows import without_empty_row_cotangents
from conformance.evidence import Evidence
from conformance.finding import Finding
from conformance.inputs import Inputs, inputs_of, redraw
from conformance.problem import Case
from conformance.session import expected_names
from conformance.target import TargetDescription, load_target
from conformance.variants import variant_inputs, variants_of

_ADAPTERS = Path(__file__).parent / "adapters"


@pytest.fixture
def adapter() -> Callable[[str], str]:
    """From "file:attribute" to the spec of an adapter of this folder."""

    def spec(name: str) -> str:
        file, _, attribute = name.partition(":")
        return f"{_ADAPTERS / file}.py:{attribute}"

    return spec


@pytest.fixture
def small_cases() -> Callable[..., tuple[Case, ...]]:
    """The first `count` cases of the quick list that satisfy a condition, among those that cost little."""

    def first(count: int, condition: Callable[[Case], bool] = lambda case: True) -> tuple[Case, ...]:
        cheap = (
            case
            for case in case_list("quick", 0, 0)
            if case.problem.seq_len * case.problem.batch <= 128 and case.problem.num_devices <= 8 and condition(case)
        )
        taken = tuple(case for case, _ in zip(cheap, range(count), strict=False))
        assert len(taken) == count, f"the quick list holds {len(taken)} such cases, {count} are needed"
        return taken

    return first


@pytest.fixture
def judged(adapter: Callable[[str], str]) -> Callable[[str, str, str], Outcome]:
    """From an adapter ("file:attribute"), a case's text and a check: what the check says of the adapter on the case."""
    from conformance.execution import execute  # imports JAX: only for the tests that ask for it

    def run(name: str, case_text: str, check: str) -> Outcome:
        target, case = load_target(adapter(name) if "." not in name else name), parse_case(case_text)
        message, arrays = execute(target, case, lambda phase: None, (check,))
        assert not message.keys() & {"declined", "raised", "broken"}, f"it did not run: {message}"
        variants = variants_of(case, (check,))
        return CHECKS[check].run(Evidence(target.description, case, message, arrays, variants))

    return run


@pytest.fixture
def right_evidence() -> Callable[..., Evidence]:
    """The evidence of a target that gives the reference itself, on the draws and `variants`; `changed` arrays take the
    place of some of them.
    """

    def build(
        case: Case,
        changed: Mapping[str, np.ndarray] | None = None,
        message: Mapping[str, Any] | None = None,
        variants: tuple[str, ...] = (),
        **of: Any,
    ) -> Evidence:
        description = dataclasses.replace(TargetDescription("module:target", "target"), **of)
        empty = Evidence(description, case, {}, {}, variants)
        arrays = {name: _answered(empty, name) for name in sorted(expected_names(empty))}
        return Evidence(description, case, message or {"misplaced": {}}, arrays | dict(changed or {}), variants)

    return build


def _answered(evidence: Evidence, name: str) -> np.ndarray:
    """The reference of one array, in layout order and float64."""
    data, call, tensor = name.split("/")
    tensor = tensor.removesuffix(" of vjp")
    if data.isdigit():
        reference = answer_for(evidence.target, evidence.case, int(data), call).reference[tensor]
    else:
        reference = _answer_to_variant(evidence.target.empty_rows, evidence.case, data, call)[tensor]
    return reference if reference.ndim < 3 else reference[:, evidence.case.problem.positions()]


@functools.lru_cache(maxsize=32)
def _answer_to_variant(empty_rows: str, case: Case, variant: str, call: str) -> dict[str, np.ndarray]:
    """The oracle's answer to a variant, by tensor."""
    problem, inputs = case.problem, variant_inputs(case, variant)
    if empty_rows == "undefined":
        inputs = without_empty_row_cotangents(inputs, problem)
    arrays = (inputs.query, inputs.key, inputs.value)
    options: oracle.AttentionOptions = {
        "window": problem.window,
        "segment_ids": inputs.segment_ids,
        "padding_segment_id": problem.padding,
        "attn_logits_soft_cap": problem.attn_logits_soft_cap,
        "sinks": inputs.sinks,
        "scale": problem.scale,
    }
    with np.errstate(over="ignore", invalid="ignore"):
        out, lse = oracle.attention(*arrays, **options)
        dlse = inputs.dlse if call == "attention_with_lse" else None
        gradients = oracle.attention_vjp(*arrays, dout=inputs.dout, dlse=dlse, **options)._asdict()
    if problem.shared_kv:
        gradients["dkey"] = gradients["dkey"] + gradients["dvalue"]
    return {"out": out, "lse": lse, **gradients}


@pytest.fixture
def modelled() -> Callable[..., Evidence]:
    """The evidence of attention written out in NumPy, float64, on the draws and on the variants of some checks.

    `sees` may hold, by tensor (out, dquery, dkey, dvalue), a function from the right mask [batch, query, key] to the
    one that is applied there; `hidden` is added to the logits of hidden keys, `leaks` times the next batch row's values
    to the values.
    """

    def build(
        case: Case,
        checks: tuple[str, ...],
        sees: Mapping[str, Callable[[np.ndarray], np.ndarray]] | None = None,
        hidden: float = -np.inf,
        leaks: float = 0.0,
    ) -> Evidence:
        description = TargetDescription("module:target", "target", empty_rows="zero")
        variants = variants_of(case, checks)
        data = {"0": inputs_of(case), "1": inputs_of(redraw(case, 1))}
        data |= {name: variant_inputs(case, name) for name in variants}
        arrays: dict[str, np.ndarray] = {}
        for name, inputs in data.items():
            tensors = _attend(case, inputs, sees or {}, hidden, leaks)
            for tensor, array in tensors.items():
                placed = array if tensor == "dsinks" else array[:, case.problem.positions()]
                arrays[f"{name}/attention/{tensor}"] = placed
            arrays[f"{name}/attention/out of vjp"] = arrays[f"{name}/attention/out"]
        return Evidence(description, case, {"misplaced": {}}, arrays, variants)

    return build


def _attend(
    case: Case, inputs: Inputs, sees: Mapping[str, Callable[[np.ndarray], np.ndarray]], hidden: float, leaks: float
) -> dict[str, np.ndarray]:
    problem = case.problem
    group = problem.num_query_heads // problem.num_kv_heads
    query, dout = inputs.query.astype(float), inputs.dout.astype(float)
    key, value = (np.repeat(x.astype(float), group, axis=2) for x in (inputs.key, inputs.value))
    value = value + leaks * np.roll(value, 1, axis=0)
    scale = problem.scale or 1 / math.sqrt(problem.head_dim)
    products = scale * np.einsum("bqhd,bkhd->bhqk", query, key)
    cap = problem.attn_logits_soft_cap
    logits = products if cap is None else cap * np.tanh(products / cap)
    slope = 1.0 if cap is None else 1 - np.tanh(products / cap) ** 2
    sinks = np.full(problem.num_query_heads, -np.inf) if inputs.sinks is None else inputs.sinks.astype(float)
    right = _right_mask(case, inputs)

    def probabilities(tensor: str) -> np.ndarray:
        mask = sees.get(tensor, lambda right: right)(right)[:, None]
        masked = np.where(mask, logits, logits + hidden)
        highest = np.maximum(masked.max(axis=3), sinks[:, None])[..., None]
        highest = np.where(np.isfinite(highest), highest, 0.0)
        weights = np.exp(masked - highest)
        total = weights.sum(axis=3, keepdims=True) + np.exp(sinks[:, None, None] - highest)
        return weights / np.where(total == 0, 1.0, total)

    def dlogits(tensor: str) -> np.ndarray:
        p = probabilities(tensor)
        dp = np.einsum("bqhv,bkhv->bhqk", dout, value)
        return scale * slope * p * (dp - (p * dp).sum(axis=3, keepdims=True))

    def of_kv_heads(gradient: np.ndarray) -> np.ndarray:
        return gradient.reshape(*gradient.shape[:2], problem.num_kv_heads, group, -1).sum(axis=3)

    with np.errstate(over="ignore", invalid="ignore"):
        out = np.einsum("bhqk,bkhv->bqhv", probabilities("out"), value)
        dkey = of_kv_heads(np.einsum("bhqk,bqhd->bkhd", dlogits("dkey"), query))
        dvalue = of_kv_heads(np.einsum("bhqk,bqhv->bkhv", probabilities("dvalue"), dout))
        tensors = {"out": out, "dquery": np.einsum("bhqk,bkhd->bqhd", dlogits("dquery"), key)}
        tensors |= {"dkey": dkey + dvalue} if problem.shared_kv else {"dkey": dkey, "dvalue": dvalue}
        if inputs.sinks is not None:
            sink_share = 1 - probabilities("out").sum(axis=3)
            tensors["dsinks"] = -(sink_share * np.einsum("bqhv,bqhv->bhq", dout, out)).sum(axis=(0, 2))
    return tensors


def _right_mask(case: Case, inputs: Inputs) -> np.ndarray:
    """bool [batch, query, key], from the words of the semantics."""
    problem = case.problem
    left, right = problem.window
    positions = np.arange(problem.seq_len)
    behind = positions[:, None] - positions[None, :]
    mask = np.ones((problem.batch, *behind.shape), bool)
    mask &= True if left is None else behind <= left
    mask &= True if right is None else behind >= -right
    if inputs.segment_ids is not None:
        ids = inputs.segment_ids
        mask &= ids[:, :, None] == ids[:, None, :]
        if problem.padding is not None:
            mask &= (ids != problem.padding)[:, :, None]
    return mask


@pytest.fixture
def finding() -> Callable[..., Finding]:
    """A finding like any other, with some fields changed."""
    plain = Finding(
        target="target",
        check="output",
        tensor="out",
        signature="exceeds its allowance",
        case="v=1 seq_len=4 sliding_window_size=2",
        reading="out exceeds its allowance: at batch row 0, position 3",
        draw=0,
        rank=1,
        index=(0, 3, 1, 2),
        expected=1.0,
        got=2.0,
        allowance=0.5,
        share=2.0,
    )
    return lambda **changes: dataclasses.replace(plain, **changes)
