"""report.json: strict JSON in the documented form, whole or not there, the same for the same run."""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.case_text import parse_case
from conformance.checks import CHECKS
from conformance.devices import Devices
from conformance.finding import Finding
from conformance.report.json_report import FILE_NAME, MATRIX_NAME, prepare_directory, report_content, write_report
from conformance.runner import Plan, Run, TargetRun
from conformance.session import CONFORMS, DECLINED, FINDING, CaseResult
from conformance.target import TargetDescription

Build = Callable[..., Finding]

_CASE = parse_case("v=1 seq_len=8 sliding_window_size=3")
_DOCUMENT = Path(__file__).parents[2] / "docs" / "report.md"


@pytest.fixture
def run_of_three(finding: Build) -> Run:
    """A pass, a finding full of what JSON has no number for, and a decline."""
    found = finding(got=math.nan, expected=-math.inf, share=math.inf, detail="\x1b[31mred\x00", reading="α\u2028β")
    shares = {("contract", "call"): 0.0, ("output", "out"): math.inf}
    results = [
        CaseResult(_CASE, CONFORMS, shares={("output", "out"): 0.5}),
        CaseResult(_CASE, FINDING, (found,), shares),
        CaseResult(_CASE, DECLINED, reason="no cap"),
    ]
    target = TargetRun(TargetDescription("m:t", "target", precision={"matmul_passes": 1}), results, {found.id: found})
    return Run(Plan(("m:t",), (_CASE,) * 3, (), Devices("cpu", 8), tuple(CHECKS)), [target], seconds=12.345)


def _strictly(path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_the_report_is_strict_json_that_says_what_the_run_found(run_of_three: Run, tmp_path: Path) -> None:
    content = _strictly(write_report(run_of_three, {"seed": 7}, tmp_path))
    assert (content["format"], content["version"], content["seed"]) == ("halocheck-report", 1, 7), "what it is"
    assert (content["exit_status"], content["interrupted"], content["seconds"]) == (1, False, 12.3), "how it ended"
    (target,) = content["targets"]
    assert (target["verdict"], target["counts"]["declined"]) == ("finding", 1), "the verdict"
    assert target["target"]["precision"] == {"matmul_passes": 1}, "what it declares"
    (found,) = target["findings"]
    assert (found["got"], found["expected"], found["share"]) == ("nan", "-inf", "inf"), "strings"
    assert (found["cases"], found["id"]) == (1, "58435bb935"), "how often, and its stable id"
    assert found["replay"] == 'halocheck replay "v=1 seq_len=4 sliding_window_size=2" m:t', "the line to copy"
    assert [result["status"] for result in target["results"]] == ["conforms", "finding", "declined"], "every case"
    assert target["results"][1]["shares"] == {"contract/call": 0.0, "output/out": "inf"}, "shares by check/tensor"


def test_no_control_character_reaches_the_file(run_of_three: Run, tmp_path: Path) -> None:
    text = write_report(run_of_three, {}, tmp_path).read_text(encoding="utf-8")
    assert not [letter for letter in text if not letter.isprintable() and letter != "\n"], "as written"
    assert not [c for c in str(_strictly(tmp_path / FILE_NAME)) if ord(c) < 32], "nor once it is parsed"


def _documented(heading: str) -> set[str]:
    """The fields in the first column of the table after `heading` in docs/report.md."""
    table = _DOCUMENT.read_text(encoding="utf-8").partition(heading)[2].lstrip().partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {name.removesuffix("[]") for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_fields_are_the_documented_ones(run_of_three: Run) -> None:
    names = ("versions", "mesh", "profile", "seed", "list_hash", "cases", "covering_cases", "compiled_cases")
    content = report_content(run_of_three, dict.fromkeys(names))
    top = _documented('`"inf"`, `"-inf"`.')
    said = set(content) - {"format", "version"}
    assert said == top - {"case", "hosts"}, "docs/report.md, the report (`case`: of a replay, `hosts`: of several)"
    (target,) = content["targets"]
    assert set(target) == _documented("A target:"), "docs/report.md, a target"
    result = next(one for one in target["results"] if one["findings"])
    words = set(re.findall(r"`(\w+)[`\[]", _DOCUMENT.read_text(encoding="utf-8").partition("A result has")[2]))
    assert set(result) == words, "docs/report.md, a result"
    assert set(target["findings"][0]) == _documented("A finding:"), "docs/report.md, a finding"


def test_an_earlier_report_survives_a_failure_to_write(
    run_of_three: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = write_report(run_of_three, {"seed": 1}, tmp_path).read_bytes()

    def disk_full(self: Path, *args: Any, **kwargs: Any) -> None:
        with self.open("w") as unfinished:
            unfinished.write("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_report(run_of_three, {"seed": 2}, tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == before, "whole or not at all"
    assert {path.name for path in tmp_path.iterdir()} == {FILE_NAME, MATRIX_NAME}, "and nothing half-made is left"


def test_the_report_can_be_read_by_those_who_may_read_the_directory(run_of_three: Run, tmp_path: Path) -> None:
    ordinary = tmp_path / "ordinary"
    ordinary.write_text("")
    mode = stat.S_IMODE(write_report(run_of_three, {}, tmp_path).stat().st_mode)
    assert mode == stat.S_IMODE(ordinary.stat().st_mode), "CI uploads it from another account"


def test_the_same_run_gives_the_same_report(run_of_three: Run, tmp_path: Path) -> None:
    first = write_report(run_of_three, {"seed": 1}, tmp_path).read_bytes()
    assert write_report(run_of_three, {"seed": 1}, tmp_path).read_bytes() == first, "byte for byte"


def test_a_directory_is_made_and_one_that_cannot_be_is_refused_before_the_run(tmp_path: Path) -> None:
    prepare_directory(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == [], "made, and left empty"
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):  # noqa: PT011  # which one the system chooses
        prepare_directory(tmp_path / "file")
