"""The list of cases of a profile: the same everywhere, nothing twice, enough for each claim, never below its cover."""

from collections import Counter

import pytest

from conformance.case_list import EXAMPLES, case_list, further_case, list_hash
from conformance.case_text import format_case, parse_case
from conformance.events import EVENTS, events_of
from conformance.models import model_cases, pull_request_5608_cases


@pytest.fixture(scope="module")
def quick():
    return case_list("quick", seed=0)


@pytest.fixture(scope="module")
def ci():
    return case_list("ci", seed=3, examples=1)


def test_the_quick_list_never_changes(quick):
    """Recorded for seed 0 of version 1 on 8 devices: a change here changes what every saved report speaks of."""
    assert list_hash(quick) == RECORDED_HASH, "the same cases on any machine, Python and NumPy"


RECORDED_HASH = "45ba7d3ae88c926e48ee7c31369b5f49a5c4a3cfe64e74ee6ffd6dbbd0849fc1"


def test_the_list_is_a_pure_function_of_its_arguments(quick):
    assert case_list("quick", seed=0) == quick, "the same call, the same list"
    other = case_list("quick", seed=1)
    assert not {format_case(case) for case in other} & {format_case(case) for case in quick}, (
        "another seed, other cases"
    )


def test_no_case_stands_in_the_list_twice_and_each_is_its_text(quick):
    texts = [format_case(case) for case in quick]
    assert len(set(texts)) == len(texts), "different texts"
    assert [parse_case(text) for text in texts] == list(quick), "a case is fully determined by its text"


def test_the_quick_list_has_enough_cases_for_each_bundled_strategy(quick):
    assert len(quick) == EXAMPLES["quick"], "as many as were asked for"
    halo = [case for case in quick if case.problem.layout != "striped" and case.problem.window != (None, 0)]
    assert len(halo) >= 200, f"{len(halo)} cases that halo does not decline"


def test_the_quick_list_is_cheap_where_it_is_long(quick):
    elements = [case.problem.batch * case.problem.num_query_heads * case.problem.seq_len**2 for case in quick]
    assert sum(size > 2_000_000 for size in elements) <= 9, (
        "pull request 5608's own cases have large logits, and one more"
    )
    ranks = Counter(case.problem.context_parallelism for case in quick)
    assert ranks[8] < len(quick) / 4, f"programs over 8 ranks take longest to compile: {ranks}"


@pytest.mark.parametrize("profile", ["quick", "ci", "nightly"])
def test_some_case_of_every_list_has_a_chunk_that_is_long_beside_its_window(profile):
    long = [case.problem for case in case_list(profile, seed=5, examples=1) if case.problem.chunk_len >= 1024]
    assert [(one.layout, one.context_parallelism, one.dtype) for one in long] == [("contiguous", 2, "bfloat16")]
    left, _ = long[0].window
    assert 256 < left < 512, "more than a kernel's block, and half of the chunk need not wait for the halo"


def test_the_longer_lists_have_sinks_and_batch_rows_over_many_blocks_the_last_not_whole(ci):
    long = [case.problem for case in ci if 512 < case.problem.chunk_len < 1024]
    (one,) = long
    assert one.sinks, "dsinks is a sum over blocks"
    assert one.batch == 2
    assert one.chunk_len % 128, "no block of a kernel has fewer rows than lanes"
    assert 2 * sum(one.window) < one.chunk_len, "some queries see nothing of the neighbouring chunk"


def test_every_event_that_eight_devices_allow_is_in_the_quick_list(quick):
    counts = Counter(event for case in quick for event in events_of(case))
    rare = {event: counts[event] for event in EVENTS if counts[event] < 8}
    assert rare.pop("five or more ranks beside another axis") == 0, "it takes 10 devices"
    assert rare.pop("three or more batch rows a shard") == 0, "the lists were frozen before: hypothesis draws it"
    few_are_asked = {"remat with heads for every rank", "remat with the sequence on two axes"}
    assert rare.keys() == few_are_asked, "five cases are asked that check: fuzzing draws such cases on purpose"


def test_models_and_pull_request_5608_are_in_every_list(quick, ci):
    def shapes(cases):
        return {case.replace(seed=0) for case in cases}

    models = shapes(model_cases(0)) | shapes(pull_request_5608_cases(0))
    assert models <= shapes(quick), "in quick"
    assert models <= shapes(ci), "in ci"


def test_a_small_number_of_examples_never_cuts_the_cover(quick):
    least = case_list("quick", seed=0, examples=1)
    assert least == quick[: len(least)], "the same list, shorter"
    assert len(least) > 130 + 8 + 20, "pairs, pull request and models are still there"
    assert len(case_list("quick", seed=0, examples=400)) == 400, "and further cases on demand"


def test_ci_covers_triples(ci):
    assert len(ci) > 14 * 9 * 9, "windows times documents times values, at the least"


@pytest.mark.parametrize("num_devices", [1, 4, 8, 16])
def test_every_case_fits_the_mesh(num_devices):
    cases = case_list("quick", seed=0, num_devices=num_devices)
    assert max(case.problem.num_devices for case in cases) <= num_devices, f"on {num_devices} devices"
    assert len(cases) == EXAMPLES["quick"], "as many as anywhere"


def test_sixteen_devices_bring_many_ranks_beside_another_axis():
    counts = Counter(event for case in case_list("quick", 0, num_devices=16) for event in events_of(case))
    assert counts["five or more ranks beside another axis"] >= 8, "N of 5 or 8 meets data or tensor"


def test_further_cases_are_a_function_of_seed_and_index():
    assert further_case(4, 1000, 8) == further_case(4, 1000, 8), "no state"
    cases = [further_case(4, index, 8) for index in range(50)]
    assert len(set(cases)) == 50, "another index, another case"
    assert not any(case.problem.layout == "striped" or case.problem.window == (None, 0) for case in cases), "all halo"


def test_an_unknown_profile_is_refused():
    with pytest.raises(ValueError, match="profile must be one of quick, ci, nightly, got 'fast'"):
        case_list("fast", 0)


def test_the_hash_sees_every_case_and_their_order(quick):
    assert list_hash(quick[:2]) != list_hash(quick[1::-1]), "order"
    assert list_hash(quick[:2]) != list_hash(quick[:3]), "number"
    assert list_hash([]) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", "SHA-256 of no text"
