"""Targets that break the contract rather than the numbers: they deadlock, abort, raise, or return something else."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from gathered import right
from jax.sharding import PartitionSpec

from conformance import Declined


@dataclass(frozen=True)
class _Changed:
    """The right target, its output handed to `change`."""

    change: Callable[[Any, Any, Any], Any]
    name: str
    empty_rows: str = "zero"

    def attention(self, query: Any, key: Any, value: Any, *, problem: Any, mesh: Any, **optional: Any) -> Any:
        out = right.attention(query, key, value, problem=problem, mesh=mesh, **optional)
        return self.change(out, problem, mesh)

    def supports(self, problem: Any) -> str | None:
        return right.supports(problem)


def _abort(out: Any, problem: Any, mesh: Any) -> Any:
    print("CHECK failed: the target's last words", flush=True)
    os.abort()


def _abort_once(out: Any, problem: Any, mesh: Any) -> Any:
    """As a machine that runs out of memory once does: the marker file says that it has happened."""
    marker = Path(os.environ["ABORTED_ONCE"])
    if not marker.exists():
        marker.touch()
        os.abort()
    return out


def _raise(out: Any, problem: Any, mesh: Any) -> Any:
    raise RuntimeError("this target is broken")


def _decline(out: Any, problem: Any, mesh: Any) -> Any:
    raise Declined("this target supports nothing")


class _Deadlocks:
    """Rank 0 alone waits for everybody.

    There is no other collective: XLA's CPU backend lets ranks meet in different ones, and then corrupts its memory.
    """

    name = "deadlocks"

    def attention(self, query: Any, key: Any, value: Any, *, problem: Any, mesh: Any, **optional: Any) -> Any:
        def on_one_rank(x: Any) -> Any:
            alone = jax.lax.axis_index("context") == 0
            return jax.lax.cond(alone, lambda y: y + 0 * jax.lax.psum(y, "context"), lambda y: y, x)

        spec = PartitionSpec("data", "context", "tensor")
        return jax.shard_map(on_one_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(query)


@jax.custom_vjp
def _no_gradient(x: Any) -> Any:
    return x


def _no_backward(residuals: Any, cotangent: Any) -> Any:
    raise NotImplementedError("no backward pass yet")


_no_gradient.defvjp(lambda x: (x, None), _no_backward)


deadlocks = _Deadlocks()
aborts = _Changed(_abort, "aborts")
aborts_once = _Changed(_abort_once, "aborts_once")
raises = _Changed(_raise, "raises")
declines = _Changed(_decline, "declines")
has_no_gradient = _Changed(lambda out, problem, mesh: _no_gradient(out), "has_no_gradient")
wrong_shape = _Changed(lambda out, problem, mesh: out[..., :-1], "wrong_shape")
wrong_dtype = _Changed(lambda out, problem, mesh: out.astype(jnp.float16), "wrong_dtype")
returns_pair = _Changed(lambda out, problem, mesh: (out, out), "returns_pair")
returns_nan = _Changed(lambda out, problem, mesh: out * jnp.nan, "returns_nan")
