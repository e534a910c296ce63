"""Gradients of keys that no place of a large case asks for: what is lost there does not add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from conformance import answers, key_identities
from conformance.answers import answer_for, precision_of
from conformance.case_text import parse_case
from conformance.checks import CHECKS
from conformance.evidence import Evidence
from conformance.inputs import redraw, round_to
from conformance.key_identities import chosen_kv_heads, has_unprobed_keys, leaves_keys_unseen
from conformance.models import MODELS, full_size_case
from conformance.probed_answers import outline_of
from conformance.problem import Case
from conformance.session import expected_names
from conformance.target import TargetDescription
from oracle.places import default_places

_TARGET = TargetDescription("module:target", "target")
_CASES = [
    "v=1 seq_len=128 num_query_heads=4 num_kv_heads=2 window=none,0 layout=dual_chunk_swap context_parallelism=4",
    "v=1 batch=2 seq_len=96 num_query_heads=4 num_kv_heads=2 window=none,none layout=striped context_parallelism=4 "
    "documents=70@1+26/96 padding=1 sinks=true attn_logits_soft_cap=5.0 value_dim=6",
    "v=1 seq_len=96 window=none,0 context_parallelism=3 sinks=true shared_kv=true",
    "v=1 seq_len=128 num_query_heads=4 num_kv_heads=2 sliding_window_size=41 context_parallelism=4",
]


@pytest.fixture(autouse=True)
def few_keys_are_probed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every case counts as large, and a key is affordable up to eight readers."""
    monkeypatch.setattr(answers, "PROBE_BEYOND_PAIRS", 0)
    monkeypatch.setattr("oracle.places.UNBOUNDED_KEY_PAIRS", 8 * 96)
    monkeypatch.setattr("oracle.places.KEY_PAIRS", 40 * 40)
    monkeypatch.setattr(key_identities, "ROWS", 40)  # several blocks, the last a shorter one
    answers._answer.cache_clear()
    yield
    answers._answer.cache_clear()


def _right(case: Case, target: TargetDescription = _TARGET) -> Evidence:
    """A right target: it gives the whole answer, in the dtype of the problem, and NaN in rows that are undefined."""
    arrays = {}
    for name in expected_names(Evidence(target, case, {}, {})):
        draw, call, tensor = name.split("/")
        precision = precision_of(target, case.problem.dtype)
        whole = answers._whole(redraw(case, int(draw)), call == "attention_with_lse", False, precision)
        tensor = tensor.removesuffix(" of vjp")
        array = whole.reference[tensor].copy()
        if tensor == "out" and tensor in whole.compared:
            array[~whole.compared[tensor]] = 7.0
        array = round_to(array, case.problem.dtype)
        arrays[name] = array if array.ndim < 3 else array[:, case.problem.positions()]
    return Evidence(target, case, {}, arrays)


def _wrong(right: Evidence, tensor: str, change: Callable[[np.ndarray], None]) -> Evidence:
    array = np.array(right.arrays[f"1/attention/{tensor}"])
    change(array)
    return Evidence(right.target, right.case, {}, {**right.arrays, f"1/attention/{tensor}": array})


def _index_of(case: Case, position: int) -> int:
    return int(np.flatnonzero(case.problem.positions() == position)[0])


@pytest.mark.parametrize(
    ("text", "dtype", "has_lse"),
    [
        (_CASES[0], "float32", True),
        (_CASES[1], "float32", False),
        (_CASES[2], "bfloat16", False),
        (_CASES[3], "float32", True),
    ],
)
def test_a_right_target_adds_up_in_every_layout(text: str, dtype: str, has_lse: bool) -> None:
    case = parse_case(f"{text} dtype={dtype}")
    outcome = CHECKS["gradients"].run(_right(case, TargetDescription("module:target", "target", has_lse=has_lse)))
    assert not outcome.findings, "a right target"
    assert outcome.shares["dkey"] > 0, "its rounding is seen"


@pytest.mark.parametrize("text", _CASES)
@pytest.mark.parametrize("tensor", ["dkey", "dvalue"])
def test_a_lost_gradient_of_a_key_that_no_place_asks_for_is_found(text: str, tensor: str) -> None:
    case = parse_case(text)
    if case.problem.shared_kv:
        tensor = "dkey"
    right = _right(case)
    positions = {int(position) for _, position, _ in answer_for(_TARGET, case, 1, "attention").places.get(tensor, ())}
    assert 20 not in positions, "key 20 has too many readers"

    def lose(array: np.ndarray) -> None:
        array[:, _index_of(case, 20), 0] = 0.0

    (finding,) = CHECKS["gradients"].run(_wrong(right, tensor, lose)).findings
    assert (finding.check, finding.tensor) == ("gradients", tensor)
    assert finding.signature == "does not add up over all keys", "no element says so"
    assert finding.detail.startswith("in attention, data draw 1, batch row "), finding.detail
    assert finding.detail.endswith("kv head 0"), "where"
    assert finding.share is not None
    assert finding.share > 1, "beyond its allowance"


def test_a_number_that_is_none_does_not_add_up() -> None:
    def spoil(array: np.ndarray) -> None:
        array[0, 20, 1, 3] = np.nan

    (finding,) = CHECKS["gradients"].run(_wrong(_right(parse_case(_CASES[0])), "dvalue", spoil)).findings
    assert "is not finite" in finding.reading


def test_nothing_is_asked_where_keys_are_probed_of_structured_values_or_of_a_part_of_the_rows() -> None:
    def lose(array: np.ndarray) -> None:
        array[:, _index_of(case, 20), 0] = 0.0

    for case in (
        parse_case(_CASES[0]).replace(values="constant"),
        parse_case(_CASES[0]).replace(window=(39, 0)),
    ):
        assert not CHECKS["gradients"].run(_wrong(_right(case), "dvalue", lose)).findings, "no place, no sum"
    case = parse_case(_CASES[0])
    wrong = _wrong(_right(case), "dvalue", lose)
    in_part = Evidence(
        _TARGET, case, {}, wrong.arrays, answers=lambda draw, call: answer_for(_TARGET, case, draw, call)
    )
    assert not CHECKS["gradients"].run(in_part).findings, "a host that has its own rows alone"


@pytest.mark.parametrize(
    ("window_size", "leaves_out"), [(2**13, False), (2**13 + 1, True), (2**16, True), (None, True)]
)
def test_a_large_case_says_which_windows_leave_keys_out(
    monkeypatch: pytest.MonkeyPatch, window_size: int | None, leaves_out: bool
) -> None:
    """A window of 8,192 keys has 2^26 pairs a key: as many as are probed. One of 65,536 was probed at its end alone."""
    monkeypatch.undo()
    case = parse_case("v=1 seq_len=131072").replace(sliding_window_size=window_size)
    assert has_unprobed_keys(case) == leaves_out, "asked for sums"
    assert leaves_keys_unseen(case, in_parts=True) == leaves_out, "and hosts, which have none, say so"
    assert not leaves_keys_unseen(case, in_parts=False), "what the sums hold is seen"
    places = default_places(outline_of(case), chunk=case.problem.chunk_len, seed=0)
    inner = [place for place in places if place.side == "key" and place.position < 2**16]
    assert bool(inner) != leaves_out, "as the places have it"


def test_as_many_kv_heads_are_looked_at_as_are_affordable() -> None:
    """gpt-oss reads 2^17 tokens * 8 heads * 128 numbers a kv head, gemma-4 eight times that: 2^29 hold 4 and 1."""
    by_name = {model.name: full_size_case(model, "global") for model in MODELS if model.global_heads}
    for name, kv_heads in (("gpt-oss-20b", 4), ("gemma-4-26b-a4b", 1)):
        chosen = chosen_kv_heads(by_name[name])
        assert len(set(chosen)) == kv_heads, name
        others = {chosen_kv_heads(by_name[name].replace(seed=seed)) for seed in range(12)}
        assert len(others) > 1, "the seed decides which"
    assert chosen_kv_heads(parse_case(_CASES[1])) == ((0, 0), (0, 1), (1, 0), (1, 1)), "all of a small one"
