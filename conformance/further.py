"""What some checks ask of a target beyond the case itself: other problems, other programs, on designated cases alone.

In the worker, after a case has run. May touch: JAX and the target. Tests: tests/conformance/test_further.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from conformance.calling import Named, Setting
from conformance.designated import compiles_work
from conformance.problem import Case
from conformance.refusals import refusals
from conformance.remat_programs import remat_facts
from conformance.work_programs import work_facts


def further_facts(
    setting: Setting, case: Case, arrays: Named, report: Callable[[str], None]
) -> tuple[Named, dict[str, np.ndarray]]:
    """What the checks of the setting ask: `errors` (see refusals), `work` (work_facts), `remat` (remat_facts).

    `arrays` are the placed inputs of data draw 0. Arrays are named `remat/program/tensor`.
    """
    message: Named = {}
    results: dict[str, np.ndarray] = {}
    if "errors" in setting.checks:
        report("putting problems that no case may have")
        message["errors"] = refusals(setting)
    if "work" in setting.checks:
        report("tracing for longer sequences")
        message["work"] = work_facts(setting, compiles_work(case))
    if "remat" in setting.checks:
        report("rematerialising")
        message["remat"], results = remat_facts(setting, arrays)
    return message, results
