"""Right targets with other numerics: base-2 exponentials, rounded probabilities, the sums in reverse order."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from gathered import Gathered, attend

_LOG2_E = 1.4426950408889634


def _attend_base_2(logits: Any, mask: Any, value: Any, sinks: Any) -> Any:
    logits = jnp.where(mask[:, None], logits * _LOG2_E, -jnp.inf)
    highest = jnp.max(logits, axis=-1, keepdims=True)
    sink = -jnp.inf if sinks is None else sinks[:, None, None] * _LOG2_E
    highest = jax.lax.stop_gradient(jnp.maximum(highest, sink))
    highest = jnp.where(jnp.isfinite(highest), highest, 0)
    weights = jnp.exp2(logits - highest)
    total = weights.sum(axis=-1, keepdims=True) + jnp.exp2(sink - highest)
    total = jnp.where(total == 0, 1, total)
    return jnp.einsum("bhqk,bkhv->bqhv", weights, value) / jnp.swapaxes(total, 1, 2)


def _attend_rounded(logits: Any, mask: Any, value: Any, sinks: Any) -> Any:
    identity = jnp.eye(logits.shape[-1], dtype=value.dtype)[None, :, None, :]
    identity = jnp.broadcast_to(identity, (*value.shape[:3], identity.shape[-1]))
    probabilities = attend(logits, mask, identity, sinks).astype(jnp.bfloat16).astype(value.dtype)  # [b, q, h, k]
    return jnp.einsum("bqhk,bkhv->bqhv", probabilities, value)


def _attend_reversed(logits: Any, mask: Any, value: Any, sinks: Any) -> Any:
    return attend(logits[..., ::-1], mask[..., ::-1], value[:, ::-1], sinks)


base_2 = Gathered(attend=_attend_base_2, name="base_2")
reversed_sums = Gathered(attend=_attend_reversed, name="reversed_sums")


@dataclasses.dataclass(frozen=True)
class _Rounded(Gathered):
    precision: Any = dataclasses.field(default_factory=lambda: {"rounded_probabilities": True})


rounded_probabilities = _Rounded(attend=_attend_rounded, name="rounded_probabilities")
# The same numerics, not declared: in float32 they are a finding.
secretly_rounded = Gathered(attend=_attend_rounded, name="secretly_rounded")
