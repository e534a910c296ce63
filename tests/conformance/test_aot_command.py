"""`halocheck aot`: its options, what it makes of the compiler's answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance import cli
from conformance.aot import job
from conformance.aot.command import model_cases
from conformance.aot.job import Compiled, compile_target, compiler_environment
from conformance.aot.topologies import GENERATIONS, GIB, parse_topologies
from conformance.case_text import parse_case
from conformance.target import TargetDescription, TargetError

_CASE = parse_case("v=1 seq_len=64 sliding_window_size=9 dtype=bfloat16 seed=1")
_RIGHT = {"facts": {"compiled": [], "traced": [], "narrow_sums": [], "remote_copies": []}}
_MEMORY = {"temporary_bytes": 4 * GIB, "argument_bytes": 3 * GIB, "output_bytes": GIB}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has the compiling process answer with these messages, and end with this status."""

    def answer(*messages: dict[str, Any], status: int = 0, printed: str = "") -> None:
        def run(command: list[str], *, input: str, stdout: Any, **others: Any) -> Any:
            stdout.write(printed)
            Path(json.loads(input)["results"]).write_text("".join(json.dumps(m) + "\n" for m in messages))
            return type("Ended", (), {"returncode": status})

        monkeypatch.setattr(job.subprocess, "run", run)

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


def test_a_program_that_does_not_compile_is_a_finding_with_the_compilers_words(answers: Any) -> None:
    raised = {"type": "XlaRuntimeError", "message": "RESOURCE_EXHAUSTED: 35 GiB", "traceback": "…"}
    answers(_described(), {"raised": raised})
    (one,) = compile_target("m:t", "v5e:2x4", (_CASE,))
    (found,) = one.findings
    assert found.signature == "does not compile (XlaRuntimeError)", "by its kind"
    assert "RESOURCE_EXHAUSTED: 35 GiB" in found.reading, "in short"


def test_a_compiler_that_takes_its_process_along_is_a_finding_for_each_case_that_is_left(answers: Any) -> None:
    answers(_described(), _RIGHT | _MEMORY, status=-6, printed="CHECK failed")
    done, lost = compile_target("m:t", "v6e:2x4", (_CASE, _CASE))
    assert done.findings == (), "what was compiled before"
    assert lost.findings[0].detail == "CHECK failed", "the end of what it printed"


def test_what_is_declined_says_why_and_hides_nothing(answers: Any) -> None:
    answers(_described(), {"declined": "no such layout"})
    (one,) = compile_target("m:t", "v6e:2x4", (_CASE,))
    assert (one.reason, one.findings, one.hidden) == ("no such layout", (), (0, 0))


def test_a_target_that_does_not_load_cannot_be_compiled(answers: Any) -> None:
    answers({"load_error": "Traceback: their own"})
    with pytest.raises(TargetError, match="their own"):
        list(compile_target("m:t", "v6e:2x4", (_CASE,)))
    answers(status=1, printed="libtpu is broken")
    with pytest.raises(TargetError, match="libtpu is broken"):
        list(compile_target("m:t", "v6e:2x4", (_CASE,)))


def test_libtpu_is_told_which_tpu_to_compile_for_and_to_look_for_none() -> None:
    environment = compiler_environment("v5e:2x4", {"HOME": "/home/user"})
    assert environment["TPU_ACCELERATOR_TYPE"] == "v5litepod-8", "the accelerator of the topology"
    assert (environment["JAX_PLATFORMS"], environment["TPU_SKIP_MDS_QUERY"]) == ("cpu", "1"), "none is looked for"
    assert environment["HOME"] == "/home/user", "everything else is the caller's"


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
