"""The main job as a user runs it, in real processes: wrong targets are found, odd ones reported as what they are.

Each run takes a few small cases of the quick list. docs/targets.md and the exit statuses of docs/command-line.md are
what is held here.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from conformance import cli, watch
from conformance.case_text import format_case, parse_case
from conformance.checks import CHECKS
from conformance.devices import Devices
from conformance.finding import Finding
from conformance.problem import Case
from conformance.report.json_report import write_report
from conformance.report.terminal import replay_command
from conformance.report.verdict import TargetVerdict, exit_status, verdict_of
from conformance.runner import Plan, Run, run
from conformance.watch import HANGS

Cases = Callable[..., tuple[Case, ...]]
Spec = Callable[[str], str]

_EIGHT = Devices("cpu", 8)
_JAX_NN = "conformance.targets.jax_nn:dot_product_attention"


def _run(specs: tuple[str, ...], cases: tuple[Case, ...], shrink: bool = False) -> Run:
    return run(Plan(specs, cases, (), _EIGHT, tuple(CHECKS), shrink_findings=shrink), lambda line: None)


def _verdict(state: Run) -> TargetVerdict:
    return verdict_of(state.targets[0], state)


def _signatures(state: Run) -> set[str]:
    return {finding.signature for finding in state.targets[0].smallest.values()}


def _is_plain(case: Case) -> bool:
    """A case that the adapters of this folder take, with a halo and a window that leaves something out."""
    problem = case.problem
    left, _ = problem.window
    takes = problem.num_kv_heads % problem.tensor_parallelism == 0 and problem.ulysses_parallelism == 1
    takes = takes and problem.axis_types == "auto" and problem.dtype != "float64"
    return takes and problem.context_parallelism > 1 and left is not None and 0 < left < problem.seq_len - 1


def _is_one_document(case: Case) -> bool:
    """A window that is off by one, or wraps around, shows: no document ends before it does."""
    return _is_plain(case) and case.documents is None


def _has_two_documents(case: Case) -> bool:
    return _is_plain(case) and case.problem.padding is None and any(len(row) > 1 for row in case.documents or ())


# --- wrong targets: found, each with a replay line that a person would write -------------------------------------


@pytest.mark.parametrize(
    ("name", "condition", "tensors", "words"),
    [
        ("one_key_too_many", _is_one_document, {"out", "dquery", "dkey"}, 3),
        ("wraps_around", _is_one_document, {"out", "dquery", "dkey"}, 3),
        ("loses_halo_gradient", _is_one_document, {"dkey"}, 3),
        ("ignores_segments_across_borders", _has_two_documents, {"out", "dquery", "dkey"}, 4),
        ("remembers_first_documents", _has_two_documents, {"out", "dquery", "dkey"}, 5),
    ],
)
def test_a_wrong_target_is_found_with_a_small_replay_line(
    adapter: Spec, small_cases: Cases, name: str, condition: Callable[[Case], bool], tensors: set[str], words: int
) -> None:
    spec = adapter(f"wrong:{name}")
    state = _run((spec,), small_cases(1, condition), shrink=True)
    verdict = _verdict(state)
    assert (verdict.status, exit_status(state)) == ("finding", 1), "found"
    found = {finding.tensor: finding for finding, _ in verdict.findings}
    assert tensors <= set(found), "in the tensors that the fault reaches"
    if name == "loses_halo_gradient":
        assert not {"out", "dquery"} & set(found), "and in no other"
    if name == "remembers_first_documents":
        assert {finding.signature for finding in found.values()} == {"exceeds its allowance, on data draw 1 only"}
    for tensor in tensors:
        _assert_small(found[tensor], spec, words)


def _assert_small(finding: Finding, spec: str, words: int) -> None:
    case = parse_case(finding.case)
    assert len(finding.case.split()) <= words, f"few words: {finding.case}"
    assert case.problem.seq_len <= 8, f"few tokens: {finding.case}"
    assert shlex.split(replay_command(finding, spec)) == ["halocheck", "replay", finding.case, spec], "a line to copy"
    assert "fresh process" not in finding.reading, "it was seen again in a process of its own"


def test_the_replay_line_shows_the_finding_again(
    adapter: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f'halocheck replay "v=1 seq_len=4 sliding_window_size=1" {adapter("wrong:one_key_too_many")}'
    assert cli.main([*shlex.split(line)[1:], "--report", str(tmp_path)]) == 1, "a finding"
    shown = capsys.readouterr().out
    assert "FINDING 58435bb935 one_key_too_many output of out (1 of 1 cases)" in shown, "the same stable id"
    assert line in shown, "and the same line"
    (target,) = json.loads((tmp_path / "report.json").read_text())["targets"]
    assert {found["tensor"] for found in target["findings"]} == {"out", "dquery", "dkey", "dvalue"}, "all that is wrong"


def test_rounding_that_is_not_declared_is_a_finding_in_float32(adapter: Spec, small_cases: Cases) -> None:
    cases = small_cases(2, lambda case: _is_plain(case) and case.problem.dtype == "float32")
    state = _run((adapter("numerics:secretly_rounded"),), cases)
    assert exit_status(state) == 1, "bfloat16 probabilities are no float32"
    assert "out" in {finding.tensor for finding in state.targets[0].smallest.values()}, "in the output"


# --- targets that break their contract or their process: reported as what they are --------------------------------


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("raises", "raises RuntimeError in its forward"),
        ("has_no_gradient", "raises NotImplementedError when its gradients are taken"),
        ("wrong_shape", "wrong shape of out"),
        ("wrong_dtype", "wrong dtype of out"),
        ("returns_pair", "wrong structure of out"),
        ("returns_nan", "is not finite"),
        ("aborts", "killed by SIGABRT while tracing and compiling"),
    ],
)
def test_a_target_that_breaks_its_contract_is_a_finding_of_its_kind(
    adapter: Spec, small_cases: Cases, name: str, signature: str
) -> None:
    state = _run((adapter(f"misbehaving:{name}"),), small_cases(1, _is_plain))
    assert _signatures(state) == {signature}, "what it is, and nothing else"
    assert exit_status(state) == 1, "a finding"


def test_the_forward_of_a_target_without_gradients_is_still_compared(adapter: Spec, small_cases: Cases) -> None:
    state = _run((adapter("misbehaving:has_no_gradient"),), small_cases(1, _is_plain))
    cells = {(cell.check, cell.tensor): cell.status for cell in _verdict(state).cells}
    assert cells["output", "out"] == "conforms", "what there is"
    assert cells["gradients", "dkey"] == "not tried", "and what there is not"


def test_a_deadlock_is_a_hang_and_the_run_goes_on(
    adapter: Spec, small_cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "IDLE_SECONDS", 5.0)
    monkeypatch.setattr(watch, "IDLE_CPU_SECONDS", 0.1)  # what a busy machine leaves the right target in that time
    (case,) = small_cases(1, lambda case: _is_plain(case) and case.problem.value_dim == case.problem.head_dim)
    state = _run((adapter("misbehaving:deadlocks"), adapter("gathered:right")), (case,), shrink=True)
    assert _signatures(state) == {f"{HANGS[0]} while running draw 0"}, "seen twice, in fresh processes"
    (found,) = state.targets[0].smallest.values()
    assert found.case == format_case(case), "a hang is not shrunk"
    assert verdict_of(state.targets[1], state).status == "conforms", "the other target has its own process"


def test_a_target_that_declines_everything_never_conforms(adapter: Spec, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", "v=1 seq_len=4", adapter("misbehaving:declines")]) == 4, "inconclusive"
    shown = capsys.readouterr().out
    assert "declined every case: no verdict" in shown, "in words"
    assert "declines declined 1: this target supports nothing" in shown, "with its reason"


def test_a_crash_that_does_not_happen_again_is_inconclusive(
    adapter: Spec, small_cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ABORTED_ONCE", str(tmp_path / "marker"))
    state = _run((adapter("misbehaving:aborts_once"),), small_cases(2, _is_plain))
    verdict = _verdict(state)
    assert (tmp_path / "marker").exists(), "it did abort"
    assert (verdict.status, exit_status(state)) == ("inconclusive", 4), "neither a finding nor conformance"
    assert [result.status for result in state.targets[0].results] == ["inconclusive", "conforms"], "the run goes on"
    assert verdict.findings == (), "no finding"
    assert "killed by SIGABRT while tracing and compiling" in state.targets[0].results[0].reason, "said"


def test_a_worker_that_owes_arrays_is_a_failure_of_the_harness(
    adapter: Spec, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", "v=1 seq_len=4", adapter("meddling:drops_dkey")]) == 3, "neither 0 nor 1"
    error = capsys.readouterr().err
    assert "0/attention/dkey" in error, "what is missing"
    assert "nothing is said about the target" in error, "in words"


def test_a_target_that_does_not_import_cannot_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.py").write_text("def attention(): pass\nraise OSError('no device')\n")
    assert cli.main(["run", f"{tmp_path}/broken.py:attention", "--mesh", "cpu:1"]) == 2, "before any case"
    error = capsys.readouterr().err
    assert 'broken.py", line 2' in error, "the user's own line"
    assert "OSError: no device" in error, "and error"


# --- right targets pass -------------------------------------------------------------------------------------------


def test_right_targets_with_other_numerics_conform(adapter: Spec, small_cases: Cases) -> None:
    cases = small_cases(2, lambda case: _is_plain(case) and case.problem.dtype == "float32")
    cases += small_cases(2, lambda case: _is_plain(case) and case.problem.dtype == "bfloat16")
    specs = tuple(adapter(f"numerics:{name}") for name in ("base_2", "rounded_probabilities", "reversed_sums"))
    state = _run((*specs, adapter("gathered:right")), cases)
    for target in state.targets:
        verdict = verdict_of(target, state)
        assert verdict.status == "conforms", f"{verdict.name}: {[found.reading for found, _ in verdict.findings]}"
        assert verdict.counts["conforms"] == 4, f"{verdict.name} took all four cases"
    assert exit_status(state) == 0, "all of them"
    (remark,) = verdict_of(state.targets[1], state).remarks
    assert "rounded_probabilities=True" in remark, "declared numerics are said"


def test_jax_nn_conforms_where_it_does_not_decline(small_cases: Cases) -> None:
    def takes(case: Case) -> bool:
        problem = case.problem
        features = problem.sinks or problem.attn_logits_soft_cap is not None or problem.value_dim != problem.head_dim
        divides = problem.num_kv_heads % problem.tensor_parallelism == 0
        return divides and problem.axis_types != "mixed" and not features

    state = _run((_JAX_NN,), small_cases(2, takes) + small_cases(1, lambda case: case.problem.sinks))
    verdict = _verdict(state)
    assert (verdict.status, exit_status(state)) == ("conforms", 0), [found.reading for found, _ in verdict.findings]
    assert verdict.declined == (("jax.nn.dot_product_attention has no sinks", 1),), "and says what it declined"


# --- the run itself -----------------------------------------------------------------------------------------------


def test_ctrl_c_prints_and_writes_what_was_found(adapter: Spec, tmp_path: Path) -> None:
    spec = adapter("wrong:one_key_too_many")
    command = [sys.executable, "-m", "conformance.cli", "run", spec, "--mesh", "cpu:8", "--report", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if "one_key_too_many: out exceeds its allowance" in line:
                running.send_signal(signal.SIGINT)
                break
        shown = running.stdout.read()
    assert running.returncode == 130, shown
    assert "interrupted: this is what was found so far" in shown, "not taken for a whole run"
    assert re.search(r"FINDING \w{10} one_key_too_many \w+ of out", shown), "the finding"
    assert "halocheck replay" in shown, "and the line that replays it"
    assert "Traceback" not in shown, "no noise"
    content = json.loads((tmp_path / "report.json").read_text())
    assert (content["interrupted"], content["exit_status"]) == (True, 130), "the report says so too"
    assert "out" in {found["tensor"] for found in content["targets"][0]["findings"]}, "with the finding"
    assert content["targets"][0]["counts"]["not tried"] > 0, "and how much is missing"


def test_a_killed_run_leaves_a_whole_report_of_what_it_had_found_and_no_process(adapter: Spec, tmp_path: Path) -> None:
    spec = adapter("wrong:one_key_too_many")
    command = [sys.executable, "-m", "conformance.cli", "run", spec, "--mesh", "cpu:2", "--report", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout is not None
        seen = False
        for line in running.stdout:
            if seen:  # the report is written after the line, and before the next one
                break
            seen = "one_key_too_many: out exceeds its allowance" in line
        workers = psutil.Process(running.pid).children()
        running.kill()
    content = json.loads((tmp_path / "report.json").read_text())
    assert (content["interrupted"], content["exit_status"]) == (True, 130), "it did not come to its end"
    assert "out" in {found["tensor"] for found in content["targets"][0]["findings"]}, "what it had found by then"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["matrix.md", "report.json"], "nothing half-written"
    assert workers, "it had a worker"
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == [], "which has ended by itself"


def test_the_same_run_twice_gives_the_same_report_apart_from_times(
    adapter: Spec, small_cases: Cases, tmp_path: Path
) -> None:
    specs = (adapter("wrong:loses_halo_gradient"), adapter("misbehaving:raises"))
    cases = small_cases(2, _is_plain)
    reports = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        path = write_report(_run(specs, cases), {"seed": 0}, tmp_path / name)
        reports.append({**json.loads(path.read_text()), "seconds": None})
    assert reports[0] == reports[1], "shares, findings, tracebacks: all of it"
    assert reports[0]["exit_status"] == 1, "and not because nothing was found"
