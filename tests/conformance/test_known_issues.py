"""Known issues: the file, which findings they hide and which not, and that one that no longer fails is told."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from conformance.case_text import format_case, parse_case
from conformance.finding import Finding
from conformance.known_issues import BUNDLED, KnownIssue, KnownIssuesError, issues_of, load_known_issues

_ISSUE = {
    "target": "m:t",
    "package": "numpy",
    "versions": [importlib.metadata.version("numpy")],
    "check": "output",
    "tensor": "out",
    "signature": "is wrong",
    "only": "sliding_window_size=3 dtype=float32",
    "case": "v=1 seq_len=8 sliding_window_size=3",
    "note": "reported",
    "address": "somewhere/issues/1",
}


def _loaded(tmp_path: Path, *entries: Any) -> tuple[KnownIssue, ...]:
    path = tmp_path / "known.json"
    path.write_text(json.dumps(list(entries)))
    return load_known_issues(path)


def _finding(**changes: str) -> Finding:
    kind = {"check": "output", "tensor": "out", "signature": "is wrong"} | changes
    return Finding("t", **kind, case=_ISSUE["case"], reading="")  # type: ignore[arg-type]  # strings all of them


def test_an_issue_hides_its_own_kind_of_finding_and_no_other(tmp_path: Path) -> None:
    (issue,) = _loaded(tmp_path, _ISSUE)
    assert issue.explains(_finding()), "check, tensor and signature are its own"
    for other in ({"check": "exact"}, {"tensor": "lse"}, {"signature": "is wrong, on data draw 1 only"}):
        assert not issue.explains(_finding(**other)), f"{other} is another kind"


@pytest.mark.parametrize(
    ("case", "is_about"),
    [
        ("v=1 seq_len=16 sliding_window_size=3 layout=striped documents=7+9 seed=5", True),
        ("v=1 seq_len=8 sliding_window_size=3 dtype=bfloat16", False),
        ("v=1 seq_len=8 sliding_window_size=4", False),
        ("v=1 seq_len=8", False),
    ],
)
def test_an_issue_hides_nothing_on_cases_that_it_is_not_about(tmp_path: Path, case: str, is_about: bool) -> None:
    """The signature of an array that is wrong says nothing of why: another mistake has the same."""
    (issue,) = _loaded(tmp_path, _ISSUE)
    assert issue.explains(dataclasses.replace(_finding(), case=case)) == is_about


def test_an_issue_holds_for_its_target_and_its_versions_alone(tmp_path: Path) -> None:
    known = _loaded(tmp_path, _ISSUE, _ISSUE | {"versions": ["0.0.1"]}, _ISSUE | {"package": "no-such-package"})
    assert issues_of("m:t", known) == known[:1], "the installed version"
    assert issues_of("m:other", known) == (), "another target"


def test_an_issue_that_no_longer_fails_is_a_finding_of_its_own_kind(tmp_path: Path) -> None:
    (issue,) = _loaded(tmp_path, _ISSUE)
    stale = issue.no_longer_fails("t")
    assert stale.signature == "a known issue no longer fails: is wrong", "told apart from the issue itself"
    assert not issue.explains(stale), "and not hidden by it"
    assert stale.case == format_case(parse_case(_ISSUE["case"])), "the case that was run"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "Expecting property name"),
        ("{}", "must hold a list, got dict"),
        ('[{"target": "m:t", "verdict": "fine"}]', "entry 0 must have the fields target, package"),
        (json.dumps([_ISSUE | {"case": "v=1 sequence=8"}]), "entry 0: .*sequence"),
        (json.dumps([_ISSUE | {"only": ""}]), "entry 0: only must be fields that its case has"),
        (json.dumps([_ISSUE | {"only": "dtype=bfloat16"}]), "entry 0: only .*got 'dtype=bfloat16'"),
        (json.dumps([_ISSUE | {"only": "v=1"}]), "entry 0"),
        (json.dumps([_ISSUE | {"only": "heads=3"}]), "entry 0: .*heads"),
        (json.dumps([_ISSUE | {"versions": "0.1"}]), "a list of versions"),
        (json.dumps([{name: value for name, value in _ISSUE.items() if name != "note"}]), "entry 0: .*note"),
    ],
)
def test_a_file_that_is_none_is_refused_and_says_where(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "known.json"
    path.write_text(content)
    with pytest.raises(KnownIssuesError, match=told):
        load_known_issues(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KnownIssuesError, match="No such file"):
        load_known_issues(tmp_path / "none.json")


def test_the_bundled_file_is_well_formed() -> None:
    assert all(issue.target.startswith("conformance.targets.") for issue in load_known_issues(BUNDLED)), (
        "public kernels"
    )
