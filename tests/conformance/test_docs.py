"""The documents against the code: links lead somewhere, options are the parser's, counts and verdicts are not stale."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.case_list import case_list, list_hash
from conformance.checks import CHECKS
from conformance.devices import DEFAULT_DEVICES
from conformance.faults import CATALOGUE
from conformance.options import make_parser
from conformance.target import TargetDescription

_ROOT = Path(__file__).parents[2]
_PAGES = (_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md")))
_CODE = tuple(
    path for top in ("oracle", "impl", "conformance", "bench") for path in sorted((_ROOT / top).rglob("*.py"))
)
_TEST_FILE = re.compile(r"\btest_[\w*]+\.py")


def _text(name: str) -> str:
    return (_ROOT / name).read_text(encoding="utf-8")


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _links(page: Path) -> Iterator[tuple[Path, str]]:
    """The files that a page links to, with their anchors."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            yield (page.parent / name if name else page), anchor


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for file, anchor in _links(page):
        assert file.is_file(), f"{page.name} links to {file}"
        assert not anchor or anchor in _anchors(file), f"{page.name} links to {file.name}#{anchor}"


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_every_file_of_the_repository_that_a_page_names_is_there(page: Path) -> None:
    named = re.findall(r"(?:oracle|impl|conformance|tests|bench)/[\w/]+\.\w+", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (_ROOT / name).is_file()] == [], page.name


def test_every_test_that_a_module_names_is_there_and_every_module_of_a_package_names_one() -> None:
    tests = _ROOT / "tests"
    for path in _CODE:
        header = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        named = _TEST_FILE.findall(header)
        assert all(list(tests.rglob(name)) for name in named), f"{path.relative_to(_ROOT)} names {named}"
        if path.name != "__init__.py" and "bench" not in path.parts:
            assert named, f"{path.relative_to(_ROOT)} says nothing of its tests"


def test_the_options_in_the_documents_are_those_of_the_command_line() -> None:
    ignored = dict.fromkeys(("run", "replay", "aot", "selftest"), lambda options: 0)
    options = set(make_parser(ignored)[1]) - {"-h", "--help"}
    documented = set(re.findall(r"`(--[a-z-]+)", _text("docs/command-line.md")))
    assert documented == options, "documented and there"


def test_the_attributes_in_the_contract_are_those_that_are_read() -> None:
    table = _text("docs/targets.md").partition("| attribute |")[2].partition("\n\n")[0]
    documented = set(re.findall(r"^\| `(\w+)", table, re.MULTILINE))
    not_declared = {"spec", "has_lse", "changed_on_import", "platform", "tpu_precision_varies"}
    declared = set(TargetDescription.__dataclass_fields__) - not_declared
    assert documented == declared | {"supports", "attention_with_lse", "uses_tpu_precision"}, "each with its default"


def test_the_verdict_in_the_readme_is_of_the_list_and_the_checks_as_they_are() -> None:
    page = _text("README.md")
    cases, covering = (case_list("quick", 0, number, DEFAULT_DEVICES.count) for number in (None, 0))
    said = f"{len(cases)} cases ({len(covering)} covering, list {list_hash(cases)[:12]}) on cpu:16"
    assert said in page, "the first line"
    rows = re.findall(r"^│ (\w+) +│ (\w+) +│ (?:conforms|not)", page, re.MULTILINE)
    asked = [(name, tensor) for name, check in CHECKS.items() if name != "races" for tensor in check.tensors]
    assert rows == asked, "a row for each tensor; races has nothing to ask of these targets, and then leaves none"


def test_the_count_of_faults_is_the_catalogues() -> None:
    assert f"holds {len(CATALOGUE)} known ways to be wrong" in _text("README.md"), "README"
    assert f"Now {len(CATALOGUE)} of {len(CATALOGUE)} are seen" in _text("docs/faults.md"), "faults.md"


def test_the_checks_in_the_documents_are_those_there_are() -> None:
    table = _text("docs/checks.md").partition("| check |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert set(named) - {"aot"} == set(CHECKS), "a question each"
