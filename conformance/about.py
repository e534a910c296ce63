"""What a run says of itself: versions, devices and the list of cases, in its report and its first line.

May touch: nothing. Tests: tests/conformance/test_cli.py, tests/conformance/test_report_json.py.
"""

from __future__ import annotations

import platform
from typing import Any

from conformance.aot.topologies import DEFAULT_TOPOLOGY
from conformance.case_list import list_hash
from conformance.options import version_of
from conformance.runner import Plan


def about_run(mesh: str, plan: Plan) -> dict[str, Any]:
    """Versions, devices and the list of cases: what a verdict must say of itself."""
    return {
        "versions": versions(),
        "mesh": mesh,
        "list_hash": list_hash(plan.cases),
        "cases": len(plan.cases),
        "covering_cases": len(plan.covering),
        "compiled_cases": len(plan.compiled),
    }


def versions() -> dict[str, str]:
    """Of Python, of halocheck, and of what a verdict may depend on."""
    named = {name: version_of(name) for name in ("halocheck", "jax", "jaxlib", "numpy", "ml_dtypes")}
    return {"python": platform.python_version(), **named}


def header(about: dict[str, Any]) -> str:
    """The first line of a run."""
    of = about["versions"]
    list_part = f"{about['cases']} cases ({about['covering_cases']} covering, list {about['list_hash'][:12]})"
    if about["compiled_cases"]:
        list_part += f", {about['compiled_cases']} to compile for {DEFAULT_TOPOLOGY},"
    return f"halocheck {of['halocheck']}: {list_part} on {about['mesh']}, jax {of['jax']}"
