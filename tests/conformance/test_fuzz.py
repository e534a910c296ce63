"""The hypothesis strategy: it reaches every level and every event, and what it draws survives its own text."""

import json
from collections import Counter

import pytest
from hypothesis import Phase, find, given, settings

from conformance.case_text import case_from_json, case_to_json, format_case, parse_case
from conformance.checks import CHECKS
from conformance.events import EVENTS, events_of
from conformance.fuzz import cases, record_events
from conformance.inputs import inputs_of, redraw
from conformance.problem import Case
from conformance.space import DRAWN_ALONE, FEATURES
from conformance.target import load_target

EXAMPLES = 400
# Reproducible, and no time limit of a loaded machine decides.
STEADY = settings(max_examples=EXAMPLES, derandomize=True, database=None, deadline=None)


def drawn(num_devices=16):
    """The cases that hypothesis draws, always the same ones."""
    seen: list[Case] = []

    @settings(STEADY, phases=[Phase.generate])
    @given(cases(num_devices))
    def draw(case):
        seen.append(case)

    draw()
    return seen


@pytest.fixture(scope="module")
def drawn_cases():
    return drawn()


def test_every_event_is_reached_often_enough(drawn_cases):
    counts = Counter(event for case in drawn_cases for event in events_of(case))
    rare = {event: counts[event] for event in EVENTS if counts[event] < EXAMPLES / 50}
    assert rare.pop("float64") == 0, "the exact tier stands in the lists of cases, not in the space"
    assert not rare, f"reached in fewer than 2 of 100 cases: {rare}"


def test_every_level_that_stands_in_the_problem_is_reached(drawn_cases):
    # Cases made for remat have as many heads as go round their ranks.
    plain = [case for case in drawn_cases if not CHECKS["remat"].asks_about(case)]
    reached = {
        "layout": {case.problem.layout for case in drawn_cases},
        "ranks": {str(case.problem.context_parallelism) for case in drawn_cases},
        "mesh": {_mesh_level(case.problem) for case in drawn_cases},
        "mesh_axes": {",".join(case.problem.mesh_axes) for case in drawn_cases},
        "axis_types": {case.problem.axis_types for case in drawn_cases},
        "device_order": {case.problem.device_order for case in drawn_cases},
        # An odd chunk is rounded up where the ulysses axis cuts it in two.
        "chunk_len": {str(c.problem.chunk_len) for c in drawn_cases if c.problem.ulysses_parallelism == 1},
        "rows_per_shard": {str(case.problem.batch // case.problem.data_parallelism) for case in drawn_cases},
        "heads": {f"{case.problem.num_query_heads}/{case.problem.num_kv_heads}" for case in plain},
        "dtype": {case.problem.dtype for case in drawn_cases},
        "values": {case.values for case in drawn_cases},
    }
    levels = {feature.name: {*feature.levels, *DRAWN_ALONE.get(feature.name, ())} for feature in FEATURES}
    for name, seen in reached.items():
        assert seen == levels[name], f"levels of {name}"


def _mesh_level(problem):
    ulysses = f"x{problem.ulysses_parallelism}" if problem.ulysses_parallelism > 1 else ""
    return f"{problem.data_parallelism}x{problem.tensor_parallelism}{ulysses}"


def test_windows_of_sizes_that_no_level_names_are_drawn(drawn_cases):
    def beside_every_level(problem):
        chunk, seq_len, size = problem.chunk_len, problem.seq_len, problem.sliding_window_size
        named = {1, 2, *(n * chunk + d for n in (1, 2) for d in (-1, 0, 1)), *(seq_len + d for d in (-1, 0, 1))}
        return size is not None and size not in named

    assert sum(beside_every_level(case.problem) for case in drawn_cases) > EXAMPLES / 20, "any window at all"


def test_remat_is_asked_where_strategies_that_exchange_heads_can_run(drawn_cases):
    asked = [case for case in drawn_cases if CHECKS["remat"].asks_about(case)]
    assert EXAMPLES / 16 < len(asked) < EXAMPLES / 4, "on purpose, but not on most: each is two programs more"
    layouts = set()
    for strategy, ranks in (("ulysses", "context_parallelism"), ("usp", "ulysses_parallelism")):
        target = load_target(f"conformance.targets.bundled:{strategy}")
        suited = [case for case in asked if target.supports(case.problem) is None and getattr(case.problem, ranks) > 1]
        assert len(suited) > EXAMPLES / 50, f"{strategy} can run them, on several ranks"
        layouts |= {case.problem.layout for case in suited}
    assert layouts == {"contiguous", "dual_chunk_swap", "striped"}, "all that they have"


def test_a_shards_third_batch_row_is_cut_unlike_its_first(drawn_cases):
    rows = [case.documents for case in drawn_cases if case.problem.batch == 3 * case.problem.data_parallelism]
    assert sum(of is not None and of[0] != of[2] for of in rows) > EXAMPLES / 50, "a mask of another row is wrong there"


@pytest.mark.parametrize("num_devices", [1, 8])
def test_cases_fit_the_mesh(num_devices):
    assert max(case.problem.num_devices for case in drawn(num_devices)) <= num_devices, f"on {num_devices} devices"


@settings(STEADY, max_examples=100)
@given(cases())
def test_a_case_survives_its_text_and_its_json(case):
    record_events(case)
    assert parse_case(format_case(case)) == case, "text"
    assert case_from_json(json.loads(json.dumps(case_to_json(case)))) == case, "JSON"
    for character in "\"'`$&|;<>(){}[]*?!#~\\\n":
        assert character not in format_case(case), f"a shell minds {character!r}"


@settings(STEADY, max_examples=60)
@given(cases())
def test_every_case_has_inputs_that_fit_its_problem(case):
    for draw in (case, redraw(case, 1)):
        inputs, problem = inputs_of(draw), draw.problem
        assert inputs.query.shape == (problem.batch, problem.seq_len, problem.num_query_heads, problem.head_dim), draw
        assert (inputs.sinks is not None, inputs.segment_ids is not None) == (problem.sinks, problem.segments), draw
        assert problem == case.problem, "another draw of the same program"


def test_cases_shrink_to_the_plainest_one():
    smallest = find(cases(), lambda case: case.problem.sinks and case.problem.segments, settings=STEADY)
    plainest = "seq_len=1 num_query_heads=1 sliding_window_size=1 context_parallelism=1 sinks=true documents=1"
    assert format_case(smallest) == f"v=1 {plainest}", "the first level of every other feature, and seed 0"
