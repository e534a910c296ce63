"""What the right answer is, in NumPy and float64, and how far finite precision may stray from it.

`attention` and `attention_vjp` are the answer (docs/semantics.md); `budget` the allowances (docs/error-budgets.md);
`layout` and `mask` where positions lie and who sees whom. Imports no JAX, and nothing of `impl` or `conformance`.
"""

from oracle import banded, budget, layout, mask, outline, places, probe, sinks
from oracle.arguments import AttentionOptions, Window
from oracle.dense import AttentionGradients, AttentionResult, attention, attention_vjp

__all__ = [
    "AttentionGradients",
    "AttentionOptions",
    "AttentionResult",
    "Window",
    "attention",
    "attention_vjp",
    "banded",
    "budget",
    "layout",
    "mask",
    "outline",
    "places",
    "probe",
    "sinks",
]
