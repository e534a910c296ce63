"""Two processes of four simulated devices each: what conforms, what is found, and what a lost host is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conformance import cli, watch
from conformance.case_text import format_case, parse_case
from conformance.devices import Devices
from conformance.hosts import launch, merging
from conformance.hosts.launch import HostsRun, run_on_hosts
from conformance.process import WorkerLost
from conformance.session import CONFORMS, DECLINED, FINDING, INCONCLUSIVE
from conformance.target import TargetDescription, TargetError

_HALO = "conformance.targets.bundled:halo"
_CONTEXT = parse_case("v=1 seq_len=64 num_query_heads=2 sliding_window_size=9 context_parallelism=8")
_SINKS = _CONTEXT.replace(num_query_heads=4, num_kv_heads=2, sinks=True, tensor_parallelism=2, context_parallelism=4)
_BATCHES = parse_case(
    "v=1 batch=2 seq_len=32 layout=dual_chunk_swap sliding_window_size=7 data_parallelism=2 context_parallelism=4 "
    "documents=10+22/32 dtype=bfloat16 seed=1"
)
_SMALL = parse_case("v=1 sliding_window_size=9")

Spec = Callable[[str], str]


def _run(spec: str, *cases: object, hosts: int = 2) -> HostsRun:
    return run_on_hosts(spec, cases, Devices("cpu", 8 // hosts), hosts, lambda line: None)  # type: ignore[arg-type]  # cases


def test_the_bundled_halo_conforms_over_two_hosts_and_cases_of_fewer_devices_are_declined() -> None:
    done = _run(_HALO, _CONTEXT, _SMALL, _BATCHES, _SINKS)
    assert [result.status for result in done.results] == [CONFORMS, DECLINED, CONFORMS, CONFORMS], done.results
    assert "every host must hold some" in done.results[1].reason, "and says why"
    looked_at = {tensor for _, tensor in done.results[0].shares}
    assert looked_at == {"call", "out", "lse", "dquery", "dkey", "dvalue"}, "out and lse, and the gradients"
    assert 0 < done.results[0].shares["gradients", "dkey"] < 1, "a real comparison"
    assert 0 < done.results[3].shares["gradients", "dsinks"] < 1, "the sum of both hosts' queries"
    assert len(done.peak_bytes) == 2, "each host says what it needed"


def test_a_sinks_gradient_that_one_rank_loses_is_found(adapter: Spec) -> None:
    (result,) = _run(adapter("wrong:loses_sink_gradient"), _SINKS).results
    (found,) = result.findings
    assert (found.check, found.tensor) == ("gradients", "dsinks"), "to which every host adds"
    assert found.got != found.expected, "with both numbers"
    assert found.share is not None
    assert found.share > 100, "a quarter of the queries is no rounding"


def test_what_is_wrong_on_one_host_alone_is_found(adapter: Spec) -> None:
    (result,) = _run(adapter("wrong:wraps_around"), _CONTEXT).results
    assert result.status == FINDING, "rank 0 reads the last rank's tail"
    found = next(finding for finding in result.findings if finding.tensor == "out")
    assert found.rank == 0, "on rank 0, which the first host holds"
    assert found.case == format_case(_CONTEXT), "with its case"


def test_a_host_that_aborts_ends_the_run_with_a_finding(adapter: Spec) -> None:
    done = _run(adapter("hosts:aborts_on_the_second"), _CONTEXT, _BATCHES)
    assert len(done.results) == 1, "the other host would wait for it for ever"
    (found,) = done.results[0].findings
    assert found.signature == "killed by SIGABRT while running a case", "how it ended"
    assert found.reading.startswith("host 1 of 2: "), "and which"


def test_a_host_that_prints_megabytes_of_a_case_is_found(adapter: Spec) -> None:
    (result,) = _run(adapter("hosts:prints_on_the_second"), _CONTEXT).results
    assert [found.signature for found in result.findings] == ["prints megabytes"], "as in a process of its own"


def test_a_host_that_waits_for_nothing_ends_the_run_with_a_finding(
    adapter: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "IDLE_SECONDS", 8.0)
    (result,) = _run(adapter("hosts:sleeps_on_the_second"), _CONTEXT).results
    assert result.findings[0].signature == f"{watch.HANGS[0]} while running a case", "no CPU is used"


def test_what_one_host_declines_and_another_answers_is_no_verdict() -> None:
    answered = {"shares": [["output", "out", 0.5]], "findings": []}
    result = merging.result_of(_CONTEXT, [answered, {"declined": "not here"}])
    assert (result.status, result.reason) == (INCONCLUSIVE, "some hosts decline it: not here"), "half of it is unseen"
    assert merging.result_of(_CONTEXT, [{"declined": "not here"}] * 2).status == DECLINED, "all of them do"


def test_what_a_host_raised_is_told_before_that_another_was_lost_by_it() -> None:
    raised = {
        "target": "mine",
        "check": "contract",
        "tensor": "call",
        "signature": "raises RuntimeError in its forward",
    }
    answer = {
        "shares": [],
        "findings": [{**raised, "case": format_case(_CONTEXT), "reading": "only here", "index": None}],
    }
    lost = (0, WorkerLost("killed by SIGABRT", "running a case", ""))
    description = TargetDescription("mine:attention", "mine")
    result = merging.lost_on(description, _CONTEXT, 2, lost, [[], [answer, answer]])
    assert [one.signature for one in result.findings] == [
        "raises RuntimeError in its forward",
        "killed by SIGABRT while running a case",
    ], "the cause, which host 1 told and host 0 waited for in vain, and then what came of it"
    result = merging.lost_on(description, _CONTEXT, 2, lost, [[], [{"declined": "not on this host"}]])
    assert "host 1 declines it: not on this host" in result.findings[0].reading, (
        "a host that declines alone is a cause too"
    )


def test_a_target_that_does_not_load_on_the_hosts_cannot_start() -> None:
    with pytest.raises(TargetError, match="no such file"):
        _run("no_such_adapter.py:attention", _CONTEXT)


def test_the_command_line_shares_its_devices_among_the_hosts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = []

    def run(spec: str, cases: object, devices: Devices, hosts: int, progress: object, place: object) -> HostsRun:
        asked.append((cases, devices, hosts))
        raise TargetError("enough")

    monkeypatch.setattr(launch, "run_on_hosts", run)
    assert cli.main(["run", _HALO, "--mesh", "cpu:8", "--hosts", "2"]) == 2, "the target does not load"
    ((cases, devices, hosts),) = asked
    assert (devices, hosts) == (Devices("cpu", 4), 2), "half of them each"
    assert {case.problem.num_devices for case in cases} == {8}, "cases that every host takes part in"
    assert cli.main(["run", _HALO, "--mesh", "cpu:8", "--hosts", "3"]) == 2
    assert "--hosts must divide the 8 devices of --mesh, got 3" in capsys.readouterr().err, "the rule and the value"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            "--checks=output,visibility",
            "--checks over several hosts must be of contract, output, residuals, gradients, got 'vis",
        ),
        ("--checks=aot", "gradients, got 'aot'"),
        ("--seconds=5", "--seconds is not kept over several hosts, got 5.0"),
    ],
)
def test_what_several_hosts_cannot_do_is_refused_and_not_left_out(
    capsys: pytest.CaptureFixture[str], option: str, words: str
) -> None:
    assert cli.main(["run", _HALO, "--mesh", "cpu:8", "--hosts", "2", option]) == 2, "cannot start"
    assert words in capsys.readouterr().err, "the option and its value"


@pytest.mark.slow
def test_so_it_does_over_four_hosts() -> None:
    done = _run(_HALO, _CONTEXT, _BATCHES, hosts=4)
    assert [result.status for result in done.results] == [CONFORMS, CONFORMS], done.results
