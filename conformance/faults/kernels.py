"""Replacements for functions of the local kernel that several families of faults share.

Each `wrong(right, …)` has the arguments of the function in impl/kernels/xla.py that it stands for.
May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from conformance.faults.fault import PHASES, Replacement
from conformance.problem import Window
from impl.kernels import xla
from impl.kernels.interface import KernelConfig, KernelOperands

BACKWARD = ("backward",)
FORWARD = ("primal", "forward")


def sees(change: Callable[[Any, KernelOperands, KernelConfig], Any], phases: tuple[str, ...] = PHASES) -> Replacement:
    """The mask, [batch or 1, query, key], becomes `change(mask, operands, config)`."""

    def wrong(right: Any, operands: KernelOperands, config: KernelConfig) -> Any:
        return change(right(operands, config), operands, config)

    return Replacement(xla, "visible_keys", wrong, phases)


def window_of_mask(change: Callable[[Window], Window], phases: tuple[str, ...] = PHASES) -> Replacement:
    """The mask alone has another window; what is exchanged and which blocks are walked is as it was."""

    def wrong(right: Any, operands: KernelOperands, config: KernelConfig) -> Any:
        return right(operands, dataclasses.replace(config, window=change(config.window)))

    return Replacement(xla, "visible_keys", wrong, phases)


def operands_of_mask(
    change: Callable[[KernelOperands], KernelOperands], phases: tuple[str, ...] = PHASES
) -> Replacement:
    """The mask alone is made from other operands: other positions, or other segment ids."""

    def wrong(right: Any, operands: KernelOperands, config: KernelConfig) -> Any:
        return right(change(operands), config)

    return Replacement(xla, "visible_keys", wrong, phases)


def operands_of_product(pattern: str, change: Callable[[Any, Any], tuple[Any, Any]]) -> Replacement:
    """The two operands of one contraction ("" for all of them) are changed before they are multiplied."""

    def wrong(right: Any, asked: str, one: Any, other: Any) -> Any:
        return right(asked, *(change(one, other) if pattern in ("", asked) else (one, other)))

    return Replacement(xla, "_einsum", wrong)


LOGITS = "bqngd,bknd->bngqk"
OUT = "bngqk,bknd->bngqd"
DKEY = "bngqk,bqngd->bknd"
"""Patterns of contractions; that of dvalue is DKEY too, in a call of its own."""


def in_bfloat16(array: Any) -> Any:
    """The array rounded to bfloat16, in its own dtype; the barrier keeps XLA from dropping the round trip."""
    return lax.reduce_precision(array, exponent_bits=8, mantissa_bits=7).astype(array.dtype)


def distance_of(operands: KernelOperands) -> Any:
    """Query position minus key position, [query, key]."""
    return operands.query_positions[:, None] - operands.key_positions[None, :]


def rank() -> Any:
    """This device's index along the context axis."""
    return lax.axis_index("context")


def zeros(tree: Any) -> Any:
    """Zeros in the place of an array or of each of a tuple; None stays None."""
    if tree is None:
        return None
    return type(tree)(*map(zeros, tree)) if hasattr(tree, "_fields") else jnp.zeros_like(tree)
