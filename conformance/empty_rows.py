"""Rows without a visible key, and inputs for targets that leave them undefined.

May touch: inputs.py, NumPy; never JAX. Tests: tests/conformance/test_empty_rows.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool

from conformance.inputs import Inputs
from conformance.problem import Problem


def empty_rows(inputs: Inputs, problem: Problem) -> Bool[np.ndarray, "batch seq"] | None:
    """Where a query sees no key: at padding alone, as every window includes the query itself. None: nowhere."""
    if problem.padding is None or inputs.segment_ids is None:
        return None
    return inputs.segment_ids == problem.padding


def without_empty_row_cotangents(inputs: Inputs, problem: Problem) -> Inputs:
    """The same inputs with cotangent zero at empty rows: a target may leave their out and lse undefined."""
    empty = empty_rows(inputs, problem)
    if empty is None:
        return inputs
    return dataclasses.replace(
        inputs,
        dout=np.where(empty[:, :, None, None], np.zeros((), inputs.dout.dtype), inputs.dout),
        dlse=np.where(empty[:, :, None], np.zeros((), inputs.dlse.dtype), inputs.dlse),
    )
