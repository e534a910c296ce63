"""Targets that are wrong in the ways that issue reports tell of. Each is right but for one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gathered import Gathered, attend, visible


def _one_key_too_many(problem: Any, *rows: Any) -> Any:
    left, right = problem.window
    if left is None:
        return visible(problem, *rows)
    wider = problem.replace(window=(left + 1, right), sliding_window_size=None)
    return visible(wider, *rows)


def _wraps_around(problem: Any, positions: Any, key_positions: Any, ids: Any, key_ids: Any) -> Any:
    """Rank 0 reads rank N−1's tail, as an exchange over a cycle gives it."""
    left, _ = problem.window
    right_mask = visible(problem, positions, key_positions, ids, key_ids)
    if left is None:
        return right_mask
    distance = positions[:, :, None] + problem.seq_len - key_positions[:, None, :]
    return right_mask | ((distance <= left) & (ids[:, :, None] == key_ids[:, None, :]))


def _loses_halo_gradient(problem: Any, rank: Any, gathered: Any) -> Any:
    """Keys and values of other ranks send no gradient home."""
    rows = problem.seq_len // problem.context_parallelism
    own = (jnp.arange(problem.seq_len) // rows == rank)[None, :, None, None]
    key, value, *others = gathered
    return *(jnp.where(own, x, jax.lax.stop_gradient(x)) for x in (key, value)), *others


def _loses_sink_gradient(logits: Any, mask: Any, value: Any, sinks: Any) -> Any:
    """What the queries of rank 1 owe to the sinks is lost."""
    if sinks is not None:
        sinks = jnp.where(jax.lax.axis_index("context") == 1, jax.lax.stop_gradient(sinks), sinks)
    return attend(logits, mask, value, sinks)


def _ignores_segments_across_borders(problem: Any, positions: Any, key_positions: Any, ids: Any, key_ids: Any) -> Any:
    right_mask = visible(problem, positions, key_positions, ids, key_ids)
    no_segments = visible(problem, positions, key_positions, jnp.zeros_like(ids), jnp.zeros_like(key_ids))
    other_chunk = positions[:, :, None] // problem.chunk_len != key_positions[:, None, :] // problem.chunk_len
    return jnp.where(other_chunk, no_segments, right_mask)


class _RemembersFirstDocuments:
    """Wrong on the second data draw only: the segment ids that it saw first are used for ever."""

    name = "remembers_first_documents"
    empty_rows = "zero"

    def __init__(self) -> None:
        self._first: dict[Any, np.ndarray] = {}

    def attention(self, query: Any, key: Any, value: Any, *, problem: Any, mesh: Any, **optional: Any) -> Any:
        if "segment_ids" in optional:
            ids = optional["segment_ids"]
            first = jax.pure_callback(
                lambda seen: self._first.setdefault(problem, np.array(seen)),
                jax.ShapeDtypeStruct(ids.shape, ids.dtype),
                ids,
            )
            optional["segment_ids"] = jax.lax.with_sharding_constraint(
                first, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "context"))
            )
        return Gathered().attention(query, key, value, problem=problem, mesh=mesh, **optional)

    def supports(self, problem: Any) -> str | None:
        if problem.axis_types != "auto":
            return "its callback takes no Explicit axes"
        return Gathered().supports(problem)


class _ReadsDeviceOrder(Gathered):
    """Finds each rank by the number of its device: `place_of` makes, from devices by place, places by device."""

    def __init__(self, name: str, place_of: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__(name=name)
        object.__setattr__(self, "place_of", place_of)

    def supports(self, problem: Any) -> str | None:
        if problem.num_devices > problem.context_parallelism:
            return "its mesh has one axis"
        return super().supports(problem)

    def attention(self, query: Any, key: Any, value: Any, *, problem: Any, mesh: Any, **optional: Any) -> Any:
        devices = np.argsort(np.argsort([device.id for device in mesh.devices.flat]))
        ranks = self.place_of(devices)[devices]
        return super().attention(query, key, value, problem=_OnRanks(problem, ranks), mesh=mesh, **optional)


class _OnRanks:
    """A problem whose ranks stand where `ranks` says."""

    def __init__(self, problem: Any, ranks: np.ndarray) -> None:
        self._problem, self._ranks = problem, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._problem, name)

    def positions(self) -> np.ndarray:
        return self._problem.positions().reshape(len(self._ranks), -1)[self._ranks].reshape(-1)


one_key_too_many = Gathered(mask=_one_key_too_many, name="one_key_too_many")
wraps_around = Gathered(mask=_wraps_around, name="wraps_around")
loses_halo_gradient = Gathered(fetched=_loses_halo_gradient, name="loses_halo_gradient")
ignores_segments_across_borders = Gathered(
    mask=_ignores_segments_across_borders, name="ignores_segments_across_borders"
)
loses_sink_gradient = Gathered(attend=_loses_sink_gradient, name="loses_sink_gradient")
device_order_for_its_inverse = _ReadsDeviceOrder("device_order_for_its_inverse", lambda devices: devices)
device_order_inverted = _ReadsDeviceOrder("device_order_inverted", np.argsort)
remembers_first_documents = _RemembersFirstDocuments()
