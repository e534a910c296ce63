"""The pytest plugin, run by pytest itself on adapters of this folder: what passes, fails, is skipped and is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest_plugins = ("pytester",)

Spec = Callable[[str], str]


def _run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)


def test_there_is_one_test_for_each_check_and_area_and_k_and_m_choose_among_them(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_own="def test_own():\n    pass\n")
    listed = _run(pytester, "--halocheck-target", "m:t", "--collect-only", "-q", "-m", "halocheck")
    names = [line for line in listed.outlines if line.startswith("halocheck[m:t-")]
    assert "halocheck[m:t-everything-contract]" in names, "that something is tried"
    assert "halocheck[m:t-documents-gradients]" in names, "a check on an area"
    assert len(names) == len(set(names)) > 40, "each has an id of its own"
    assert not any("test_own" in line for line in listed.outlines), "-m halocheck leaves the user's own tests out"
    chosen = _run(pytester, "--halocheck-target", "m:t", "--collect-only", "-q", "-k", "documents-gradients")
    assert [line for line in chosen.outlines if line.startswith("halocheck[")] == [
        "halocheck[m:t-documents-gradients]"
    ], "-k takes part of an id"


def test_a_wrong_target_fails_its_area_with_a_replay_line(pytester: pytest.Pytester, adapter: Spec) -> None:
    result = _run(pytester, "--halocheck-target", adapter("wrong:one_key_too_many"), "-k", "striped-output")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*kinds of finding in * cases*", '*halocheck replay "v=1 *" *wrong.py:one_key_too_many*']
    )


def test_two_lines_in_a_test_file_are_the_same_suite(pytester: pytest.Pytester, adapter: Spec) -> None:
    spec = adapter("gathered:right")
    pytester.makepyfile(
        f"from conformance.pytest_plugin import conformance_test\ntest_mine = conformance_test({spec!r})\n"
    )
    result = _run(pytester, "-v", "-k", "striped and (output or contract) or exact-exact")
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(["*test_mine?striped-output? PASSED*", "*test_mine?exact-exact? SKIPPED*"])


def test_a_target_that_does_not_load_fails_with_its_own_traceback(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(broken_adapter="raise RuntimeError('no licence')\n")
    result = _run(pytester, "--halocheck-target", "broken_adapter:attention", "-k", "striped-output")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*broken_adapter:attention does not load*", "*RuntimeError: no licence*"])


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--halocheck-mesh=gpu", "--halocheck-mesh must be tpu, or cpu:N"),
        ("--halocheck-seed=-1", "--halocheck-seed must be >= 0, got -1"),
        ("--halocheck-examples=0", "--halocheck-examples must be >= 1, got 0"),
    ],
)
def test_a_bad_option_is_a_usage_error_that_names_it(pytester: pytest.Pytester, option: str, told: str) -> None:
    result = _run(pytester, option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR, "nothing is run"
    assert told in result.stderr.str(), "the option, the rule and the value"


def test_tpus_are_taken_in_one_process_and_a_machine_without_one_is_told(pytester: pytest.Pytester) -> None:
    shared = _run(pytester, "--halocheck-mesh", "tpu", "-n", "2")
    assert shared.ret == pytest.ExitCode.USAGE_ERROR, "a TPU belongs to one process"
    shared.stderr.fnmatch_lines(["*--halocheck-mesh tpu takes one process, without -n*"])
    alone = _run(pytester, "--halocheck-mesh", "tpu")
    assert alone.ret == pytest.ExitCode.USAGE_ERROR, "there is none here"
    alone.stderr.fnmatch_lines(["*--halocheck-mesh tpu: this machine has no TPU: *"])
