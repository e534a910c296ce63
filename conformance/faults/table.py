"""The catalogue as a Markdown table: what docs/faults.md holds, and a test holds it to.

May touch: the catalogue. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

from conformance.faults import CATALOGUE, KINDS
from conformance.faults.fault import NOT_PUBLIC, Fault


def faults_by_kind() -> str:
    """A section a kind: its faults with their reports, what goes wrong, and the smallest case that shows it."""
    sections = []
    for kind, meaning in KINDS.items():
        rows = [_row(fault) for fault in CATALOGUE.values() if fault.kind == kind]
        header = "| fault | in | report | what is wrong | smallest case |\n| --- | --- | --- | --- | --- |"
        sections.append("\n".join([f"## {kind}. {meaning[0].upper()}{meaning[1:]}", "", header, *rows]))
    return "\n\n".join(sections) + "\n"


def _row(fault: Fault) -> str:
    address = "not found" if fault.report == NOT_PUBLIC else f"[{fault.report}](https://github.com/{fault.report})"
    return f"| `{fault.name}` | {fault.planted_in} | {address} | {fault.sentence} | `{fault.smallest}` |"


if __name__ == "__main__":
    print(faults_by_kind(), end="")
