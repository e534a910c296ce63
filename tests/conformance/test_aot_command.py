"""`halocheck aot`: its options, what it makes of the compiler's answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance import cli
from conformance.aot import command, job
from conformance.aot.command import model_cases
from conformance.aot.job import Compiled, compile_target
from conformance.aot.topologies import GENERATIONS, GIB, parse_topologies
from conformance.case_text import parse_case
from conformance.process import WorkerLost
from conformance.target import TargetDescription, TargetError

_HALO = "conformance.targets.bundled:halo"
_CASE = parse_case("v=1 seq_len=64 sliding_window_size=9 dtype=bfloat16 seed=1")
_RIGHT = {"facts": {"compiled": [], "traced": [], "narrow_sums": [], "remote_copies": []}}
_MEMORY = {"temporary_bytes": 4 * GIB, "argument_bytes": 3 * GIB, "output_bytes": GIB}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has the compiling process answer with these messages."""

    def answer(*messages: dict[str, Any] | WorkerLost) -> None:
        monkeypatch.setattr(job, "answers", lambda spec, topology, cases, schedules: (one for one in messages))

    return answer


def _described(**fields: Any) -> dict[str, Any]:
    described = TargetDescription("m:t", "target", **fields)
    return {"description": {name: getattr(described, name) for name in described.__dataclass_fields__}}


def test_topologies_are_named_as_libtpu_names_them_and_all_is_one_of_each_generation() -> None:
    assert parse_topologies("v6e:2x4,v5p:2x2x2") == ("v6e:2x4", "v5p:2x2x2")
    assert len(parse_topologies("all")) == len(GENERATIONS) == 5, "v4, v5e, v5p, v6e, tpu7x"


@pytest.mark.parametrize("text", ["", "v6e", "v6e:", "v9:2x2", "v6e:2xx4", "tpu"])
def test_any_other_topology_is_refused_with_the_value(text: str) -> None:
    with pytest.raises(ValueError, match="topology must be like v4:2x2x2") as refused:
        parse_topologies(text)
    assert repr(text) in str(refused.value), "the message names it"


def test_the_layers_are_those_of_the_models_at_full_size() -> None:
    cases = model_cases(("gpt-oss-20b", "mistral-7b-v0.1"), ("local", "global"), ("contiguous",))
    shapes = [(case.problem.num_query_heads, case.problem.sliding_window_size) for case in cases]
    assert shapes == [(64, 128), (64, None), (32, 4096)], "Mistral has no GLOBAL layer"
    assert {case.problem.seq_len for case in cases} == {131072}, "128K tokens"
    with pytest.raises(ValueError, match=r"model must be one of .*got 'gemma'"):
        model_cases(("gemma",), ("local",), ("contiguous",))


def test_what_the_strategy_forbids_is_a_finding_and_what_it_allows_is_not(answers: Any) -> None:
    gather = {
        "kind": "all-gather",
        "dtypes": ["bfloat16"],
        "bytes": 1024,
        "axes": ["context"],
        "pairs": [],
        "group_size": None,
        "trips": 1,
        "phase": "forward/attention",
    }
    wrong = {"facts": _RIGHT["facts"] | {"traced": [gather]}}
    answers(_described(communication="halo"), _RIGHT | _MEMORY, wrong | _MEMORY)
    right, forbidden = compile_target("m:t", "v6e:2x4", (_CASE, _CASE))
    assert right.findings == (), "a program that sends nothing"
    assert [found.signature for found in forbidden.findings] == ["uses all-gather"], "halo sends by permutes alone"
    assert right.memory_share == pytest.approx(8 / 32), "temporaries, arguments and results, of v6e's 32 GiB"


def test_a_kernel_that_is_interpreted_is_a_finding(answers: Any) -> None:
    answers(_described(), _RIGHT | _MEMORY | {"interpreted": ["my_kernel"]})
    (one,) = compile_target("m:t", "v6e:2x4", (_CASE,))
    (found,) = one.findings
    assert (found.check, found.tensor, found.signature) == ("aot", "program", "interprets a kernel"), "no custom call"
    assert "my_kernel" in found.reading, "which"


def test_a_direction_without_the_kernel_that_is_claimed_for_it_is_a_finding(answers: Any) -> None:
    """A target that falls back to plain operations for a shape compiles, and is not what it says."""
    fell_back = {"kernel_phases": ["forward/attention"]}
    answers(_described(tpu_kernels=("forward", "backward")), _RIGHT | _MEMORY | fell_back)
    (one,) = compile_target("m:t", "v6e:2x4", (_CASE,))
    assert [found.signature for found in one.findings] == ["has no kernel in its backward"], "the forward has one"
    answers(_described(), _RIGHT | _MEMORY | fell_back)
    (one,) = compile_target("m:t", "v6e:2x4", (_CASE,))
    assert one.findings == (), "who claims none needs none"


def test_a_program_that_does_not_compile_is_a_finding_with_the_compilers_words(answers: Any) -> None:
    raised = {"type": "XlaRuntimeError", "message": "RESOURCE_EXHAUSTED: 35 GiB", "traceback": "…"}
    answers(_described(), {"raised": raised})
    (one,) = compile_target("m:t", "v5e:2x4", (_CASE,))
    (found,) = one.findings
    assert found.signature == "does not compile (XlaRuntimeError)", "by its kind"
    assert "RESOURCE_EXHAUSTED: 35 GiB" in found.reading, "in short"


def test_what_is_declined_says_why_and_hides_nothing(answers: Any) -> None:
    answers(_described(), {"declined": "no such layout"})
    (one,) = compile_target("m:t", "v6e:2x4", (_CASE,))
    assert (one.reason, one.findings, one.hidden) == ("no such layout", (), (0, 0))


def test_a_target_that_does_not_load_cannot_be_compiled(answers: Any) -> None:
    answers({"load_error": "Traceback: their own"})
    with pytest.raises(TargetError, match="their own"):
        list(compile_target("m:t", "v6e:2x4", (_CASE,)))
    answers(WorkerLost("exited with status 1", "compiling", "libtpu is broken"))
    with pytest.raises(TargetError, match="libtpu is broken"):
        list(compile_target("m:t", "v6e:2x4", (_CASE,)))


@pytest.mark.parametrize(
    ("findings", "facts", "status"), [((), {"transfers": ()} | _MEMORY, 0), ((), {}, 4), ((None,), {}, 1)]
)
def test_the_exit_status_is_that_of_any_command(
    monkeypatch: pytest.MonkeyPatch, findings: Any, facts: Any, status: int
) -> None:
    monkeypatch.setattr(cli, "has_libtpu", lambda: True)
    made = Compiled("t", "v6e:2x4", _CASE, facts, findings)
    monkeypatch.setattr(cli, "compile_all", lambda *args: (made,))
    assert cli.main(["aot"]) == status, "0 compiles, 4 nothing did, 1 a finding"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--topology", "v9:1"], "--topology must be like"),
        (["--models", "gemma"], "--model must be one of"),
        (["--layers", "middle"], "--layers must be of local, global, got 'middle'"),
    ],
)
def test_a_bad_option_cannot_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    monkeypatch.setattr(cli, "has_libtpu", lambda: True)
    assert cli.main(["aot", *options]) == 2
    assert told in capsys.readouterr().err, "what was wrong"


def test_without_libtpu_one_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "has_libtpu", lambda: False)
    assert cli.main(["aot"]) == 2
    assert capsys.readouterr().err == (
        "halocheck: compiling for an absent TPU needs libtpu: pip install 'halocheck[aot]'\n"
    )


def test_an_interrupt_leaves_what_was_compiled_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "has_libtpu", lambda: True)
    told = [_described(), {"declined": "no such layout"}, {"raised": {"type": "E", "message": "no", "traceback": ""}}]

    def interrupted(spec: str, topology: str, cases: Any, schedules: bool) -> Any:
        yield from told
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "answers", interrupted)
    assert cli.main(["aot", _HALO, "--report", str(tmp_path)]) == 130, "interrupted, of four layers"
    written = json.loads((tmp_path / "aot.json").read_text())
    assert [one["status"] for one in written] == ["declined: no such layout", "finding"], "what was compiled by then"
    printed = capsys.readouterr().out
    assert "declined: no such layout" in printed, "the table"
    assert "does not compile (E): no\n" in printed, "and the finding"
    assert f"  {written[1]['case']}\n" in printed, "with its case in one line, to be copied"


def test_a_kernel_that_the_traced_programs_do_not_know_by_name_is_not_said_to_run_never() -> None:
    runs = {"plain": {"named": 2}, "nothing saved": {}}
    assert command._runs_of("named", runs) == ["2", "0 with nothing saved"], "as it is counted"
    assert command._runs_of("shard_map", runs)[0] == "unknown", "a name that the compiler gave to one without"
