"""One call of a target as its contract says, and the function of the arrays of a problem that a program is made of.

What a target returns is held to the contract while it is traced. May touch: JAX and the target.
Tests: tests/conformance/execution/test_*.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from conformance.problem import Problem
from conformance.target import Target
from conformance.traced import scope

Named = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What every step of one execution needs. `checks`: those that will judge it."""

    target: Target
    problem: Problem
    mesh: jax.sharding.Mesh
    calls: tuple[str, ...]
    checks: Collection[str] = ()


class ContractBroken(Exception):
    """The target returned something that is not what the contract says."""

    def __init__(self, tensor: str, quality: str, expected: str, got: str) -> None:
        super().__init__(f"{quality} of {tensor}: expected {expected}, got {got}")
        self.tensor, self.quality, self.expected, self.got = tensor, quality, expected, got


def numerics_facts(target: Target, problem: Problem, mesh: jax.sharding.Mesh) -> Named:
    """`uses_tpu_precision`: False, where the target says so of this problem on a mesh of TPUs."""
    if mesh.devices.flat[0].platform != "tpu" or target.uses_tpu_precision(problem, mesh):
        return {}
    return {"uses_tpu_precision": False}


def forward(setting: Setting, arrays: Named) -> Named:
    """The primal calls: `call/out`, and `attention_with_lse/lse`."""
    results: Named = {}
    for call in setting.calls:
        with scope("primal", call):
            results |= {f"{call}/{name}": array for name, array in call_target(setting, call, arrays).items()}
    return results


def forward_and_gradients(setting: Setting, arrays: Named) -> Named:
    """The primal calls, the VJP's own forward (`call/out of vjp`) and the gradients (`call/dquery`, …)."""
    results = forward(setting, arrays)
    differentiable = {name: arrays[name] for name in ("query", "key", "value", "sinks") if name in arrays}
    others = {name: array for name, array in arrays.items() if name not in differentiable}
    for call in setting.calls:
        if call == "attention_with_lse" and not setting.target.description.lse_grad:
            continue
        with scope("forward", call):
            outputs, vjp = jax.vjp(
                lambda inputs, call=call: call_target(setting, call, {**others, **inputs}), differentiable
            )
        with scope("backward", call):
            (gradients,) = vjp({name: arrays[f"d{name}"] for name in outputs})
        results |= {f"{call}/{name} of vjp": array for name, array in outputs.items()}
        results |= {f"{call}/d{name}": array for name, array in gradients.items()}
    return results


def call_target(setting: Setting, call: str, arrays: Named) -> Named:
    """One call of the target, as its contract says; what it returns is held to the contract while tracing."""
    problem = setting.problem
    optional = {name: arrays[name] for name in ("segment_ids", "sinks") if name in arrays}
    value = arrays["key"] if problem.shared_kv else arrays["value"]
    function = getattr(setting.target, call)
    returned = function(arrays["query"], arrays["key"], value, problem=problem, mesh=setting.mesh, **optional)
    if call == "attention":
        returned = (returned,)
    names = ("out", "lse")[: 1 + (call == "attention_with_lse")]
    if not isinstance(returned, tuple | list) or len(returned) != len(names):
        raise ContractBroken(names[-1], "structure", f"({', '.join(names)})", _describe(returned))
    rows = (problem.batch, problem.seq_len, problem.num_query_heads)
    expected = {
        "out": jax.ShapeDtypeStruct((*rows, problem.value_dim), arrays["query"].dtype),
        "lse": jax.ShapeDtypeStruct(rows, np.float64 if problem.dtype == "float64" else np.float32),
    }
    return {name: _held_to(name, got, expected[name]) for name, got in zip(names, returned, strict=True)}


def _held_to(name: str, got: Any, expected: jax.ShapeDtypeStruct) -> Any:
    if not isinstance(got, jax.Array):
        raise ContractBroken(name, "structure", "one array", _describe(got))
    if got.shape != expected.shape:
        raise ContractBroken(name, "shape", str(expected.shape), str(got.shape))
    if got.dtype != expected.dtype:
        raise ContractBroken(name, "dtype", str(expected.dtype), str(got.dtype))
    return got


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
