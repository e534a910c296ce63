"""What the tests of the harness share: where the adapters are, small cases of the list, evidence with right answers.

May touch: conformance and the oracle; JAX never, so that a test of plain data starts at once.
"""

from __future__ import annotations

import dataclasses
import functools
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
