"""Known issues of targets: a kind of finding that has been reported, hidden from the verdict, and that alone.

Each names versions, the fields of the cases that it is about, and one case, which is run every time: an issue that no
longer fails there is a finding itself.
May touch: a JSON file, the installed versions. Tests: tests/conformance/test_known_issues.py.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.case_text import format_case, parse_case, read_fields
from conformance.finding import Finding
from conformance.problem import Case, InvalidCase

BUNDLED = Path(__file__).parent / "targets" / "known_issues.json"
"""What is known of the public kernels of `conformance.targets`."""


class KnownIssuesError(Exception):
    """A file of known issues cannot be used; the message says where it is wrong."""


@dataclass(frozen=True)
class KnownIssue:
    """One kind of finding (check, tensor, signature) of one `target` (its spec) with some `versions` of `package`.

    `only` are fields of the cases that it is about, as in their text (`dtype=bfloat16 sinks=true`): most signatures say
    that an array is wrong, not why, and would hide whatever else makes it wrong. `address` is where it was reported (""
    if nowhere yet), `note` a sentence, `case` the text of a case that shows it.
    """

    target: str
    package: str
    versions: tuple[str, ...]
    check: str
    tensor: str
    signature: str
    only: str
    case: str
    note: str
    address: str = ""

    def explains(self, finding: Finding) -> bool:
        """Whether the finding is of this very kind, on a case that the issue is about."""
        return finding.kind == (self.check, self.tensor, self.signature) and self.is_about(parse_case(finding.case))

    def is_about(self, case: Case) -> bool:
        """Whether the case has the fields of `only`."""
        return all(_field(case, name) == value for name, value in read_fields(self.only).items())

    def no_longer_fails(self, target_name: str) -> Finding:
        """The finding for an issue whose case did not show it."""
        return Finding(
            target=target_name,
            check=self.check,
            tensor=self.tensor,
            signature=f"a known issue no longer fails: {self.signature}",
            case=format_case(parse_case(self.case)),
            expected=self.signature,
            got="nothing of it",
            reading=f"{self.tensor} is said to be wrong here ({self.note}), and is not: the issue must be taken out",
        )


def load_known_issues(path: Path) -> tuple[KnownIssue, ...]:
    """The issues of a file: a JSON list of objects with the fields of KnownIssue.

    Raises:
        KnownIssuesError: no such file, no JSON, an object with other fields, or a case that is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KnownIssuesError(f"{path}: {error}") from error
    if not isinstance(content, list):
        raise KnownIssuesError(f"{path}: must hold a list, got {type(content).__name__}")
    return tuple(_issue(path, number, entry) for number, entry in enumerate(content))


def issues_of(spec: str, issues: Sequence[KnownIssue]) -> tuple[KnownIssue, ...]:
    """Those that are known of a target with what is installed here."""
    return tuple(issue for issue in issues if issue.target == spec and _version(issue.package) in issue.versions)


def _issue(path: Path, number: int, entry: object) -> KnownIssue:
    fields = {field.name: field for field in dataclasses.fields(KnownIssue)}
    if not isinstance(entry, dict) or not set(entry) <= set(fields):
        raise KnownIssuesError(f"{path}: entry {number} must have the fields {', '.join(fields)}, got {entry!r}")
    try:
        issue = KnownIssue(**entry)
        is_about_its_case = issue.is_about(parse_case(issue.case))
    except (TypeError, AttributeError, InvalidCase) as error:
        raise KnownIssuesError(f"{path}: entry {number}: {error}") from error
    if not isinstance(issue.versions, list) or not issue.signature:
        raise KnownIssuesError(f"{path}: entry {number} must have a list of versions and a signature")
    if not issue.only.split() or not is_about_its_case:
        raise KnownIssuesError(
            f"{path}: entry {number}: only must be fields that its case has, such as dtype=bfloat16, got {issue.only!r}"
        )
    return dataclasses.replace(issue, versions=tuple(issue.versions))


def _field(case: Case, name: str) -> object:
    return getattr(case if hasattr(case, name) else case.problem, name)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
