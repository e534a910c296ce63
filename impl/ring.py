"""The ring strategy: K and V rotate past all ranks that see them, and partial results are merged by their lse.

Communication is `lax.ppermute` by one rank at a time; in the backward K and V rotate again, their gradients beside them
in float32, which then go home. Tested in tests/impl/test_strategies.py and test_ring.py.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from impl import layout as layouts
from impl import local_attention
from impl.kernels.interface import KernelOperands, LocalGradients, RowCotangents
from impl.layer import Layer
from impl.sharded import sharded_attention
from impl.strategy import Operands, Received, Strategy

Window = tuple[int | None, int | None]


def ring(operands: Operands, layer: Layer, mesh: Mesh) -> tuple[Array, Array]:
    """Attention of global arrays whose K and V rotate along the context axis; returns (out, lse)."""
    return sharded_attention(operands, STRATEGY, layer, mesh)


@functools.lru_cache(maxsize=256)
def rotations(layout: str, context_parallelism: int, seq_len: int, window: Window) -> tuple[int, int]:
    """How many ranks K and V pass `(upwards, downwards)`: rank r reads those of r − 1 … r − up and r + 1 … r + down.

    Ranks stand in a circle. A full ring is (N − 1, 0); with a window K and V go no further than somebody sees them, and
    dual_chunk_swap may need both directions, since the predecessors of high chunks lie on the ranks above.
    """
    needed = [
        distance
        for distance in range(1, context_parallelism)
        if _sees_rank_before(distance, layout, context_parallelism, seq_len, window)
    ]
    splits = [
        (upwards, max((context_parallelism - distance for distance in needed if distance > upwards), default=0))
        for upwards in range(context_parallelism)
    ]
    return min(splits, key=lambda split: (sum(split), split[1]))


def _sees_rank_before(distance: int, layout: str, context_parallelism: int, seq_len: int, window: Window) -> bool:
    """Whether some rank r has a query that sees a key of rank `(r − distance) mod N`."""
    left, right = (seq_len if reach is None else reach for reach in window)
    if layout == "striped":
        return distance <= left or context_parallelism - distance <= right
    slots = range(layouts.chunks_per_rank(layout))
    chunk = seq_len // (context_parallelism * len(slots))

    def sees(reader: int, owner: int) -> bool:
        gap = (abs(reader - owner) - 1) * chunk + 1
        return gap <= (left if owner < reader else right)

    return any(
        sees(
            layouts.chunk_of(context_parallelism, rank, slot),
            layouts.chunk_of(context_parallelism, (rank - distance) % context_parallelism, other),
        )
        for rank in range(context_parallelism)
        for slot in slots
        for other in slots
    )


class _Keys(NamedTuple):
    """What rotates in the forward: one rank's keys, values and (where the layer has them) segment ids."""

    key: Float[Array, "batch rows num_kv_heads head_dim"]
    value: Float[Array, "batch rows num_kv_heads value_dim"]
    segment_ids: Int32[Array, "batch rows"] | None


class _KeyGradients(NamedTuple):
    """What rotates beside the keys in the backward, in the accumulation dtype."""

    dkey: Float[Array, "batch rows num_kv_heads head_dim"]
    dvalue: Float[Array, "batch rows num_kv_heads value_dim"]


def _forward(operands: Operands, layer: Layer) -> tuple[Array, Array, Received]:
    own = _Keys(operands.key, operands.value, operands.segment_ids)
    # The sinks are terms of the row's sum like any other: they are added once, with the rank's own keys.
    out, lse = _attend(operands, own, layer, 0)
    others = operands._replace(sinks=None)

    def merge_step(result: tuple[Array, Array], keys: _Keys, distance: Any) -> tuple[Array, Array]:
        return _merged(result, _attend(others, keys, layer, distance))

    for direction, steps in _directions(layer):
        out, lse = _around((out, lse), own, direction, steps, layer, merge_step)
    return out, lse, Received()


def _backward(operands: Operands, received: Received, cotangents: RowCotangents, layer: Layer) -> LocalGradients:
    del received  # Keeping S rows a layer alive is what a ring is there to avoid: K and V rotate again.
    own = _Keys(operands.key, operands.value, operands.segment_ids)
    total = _attend_backward(operands, own, cotangents, layer, 0)
    others = operands._replace(sinks=None)

    def add_step(carry: tuple[Array, _KeyGradients], keys: _Keys, distance: Any) -> tuple[Array, _KeyGradients]:
        dquery, passing = carry
        step = _attend_backward(others, keys, cotangents, layer, distance)
        return dquery + step.dquery, _KeyGradients(passing.dkey + step.dkey, passing.dvalue + step.dvalue)

    for direction, steps in _directions(layer):
        nothing = _KeyGradients(jnp.zeros_like(total.dkey), jnp.zeros_like(total.dvalue))

        def advance(carry: tuple[Array, _KeyGradients], shift: int = direction) -> tuple[Array, _KeyGradients]:
            return carry[0], _rotated(carry[1], shift, layer)

        dquery, passing = _around((total.dquery, nothing), own, direction, steps, layer, add_step, advance)
        home = _rotated(passing, -direction * steps, layer)
        total = total._replace(dquery=dquery, dkey=total.dkey + home.dkey, dvalue=total.dvalue + home.dvalue)
    return total


STRATEGY = Strategy(_forward, _backward)


def _directions(layer: Layer) -> list[tuple[int, int]]:
    """(+1 or −1, steps) for each direction in which K and V rotate at all."""
    upwards, downwards = rotations(layer.layout, layer.context_parallelism, layer.seq_len, layer.kernel_config.window)
    return [(direction, steps) for direction, steps in ((1, upwards), (-1, downwards)) if steps]


def _around(
    carry: Any,
    own: _Keys,
    direction: int,
    steps: int,
    layer: Layer,
    step: Callable[[Any, _Keys, Any], Any],
    advance: Callable[[Any], Any] = lambda carry: carry,
) -> Any:
    """`step(carry, keys, distance)` for the keys of the `steps` ranks behind (ahead, if `direction` is −1).

    One loop body whatever the number of ranks: program size and tracing time do not grow with the ring. `advance` moves
    what travels with the keys from one rank to the next.
    """

    def body(state: tuple[Any, _Keys], distance: Array) -> tuple[tuple[Any, _Keys], None]:
        carry, keys = state
        arriving = _rotated(keys, direction, layer)  # Needed by the next step only: travels while this one computes.
        return (advance(step(carry, keys, direction * distance)), arriving), None

    keys = _rotated(own, direction, layer)
    if steps > 1:
        (carry, keys), _ = lax.scan(body, (carry, keys), jnp.arange(1, steps, dtype=jnp.int32))
    return step(carry, keys, direction * steps)


def _rotated(rows: Any, shift: int, layer: Layer) -> Any:
    """Every rank's rows move up by `shift` ranks, around the end."""
    size = layer.context_parallelism
    pairs = [(rank, (rank + shift) % size) for rank in range(size)]
    return jax.tree.map(lambda array: lax.ppermute(array, layer.context_axis, pairs), rows)


def _attend(operands: Operands, keys: _Keys, layer: Layer, distance: Any) -> tuple[Array, Array]:
    """This rank's queries over the keys of the rank `distance` before it; the sinks, if any, are added once."""
    calls = _kernel_calls(operands, keys, layer, distance)
    return functools.reduce(_merged, [local_attention.forward(call, layer) for call in calls])


def _attend_backward(
    operands: Operands, keys: _Keys, cotangents: RowCotangents, layer: Layer, distance: Any
) -> LocalGradients:
    calls = _kernel_calls(operands, keys, layer, distance)
    parts = [local_attention.backward(call, cotangents, layer) for call in calls]
    return LocalGradients(
        dquery=functools.reduce(jnp.add, [part.dquery for part in parts]),
        dkey=jnp.concatenate([part.dkey for part in parts], axis=1),
        dvalue=jnp.concatenate([part.dvalue for part in parts], axis=1),
        dsinks=parts[0].dsinks,
    )


def _kernel_calls(operands: Operands, keys: _Keys, layer: Layer, distance: Any) -> list[KernelOperands]:
    """One call for each chunk of keys, so that its keys are a contiguous run; the first of them has the sinks."""
    rank = lax.axis_index(layer.context_axis)
    owner = (rank - distance) % layer.context_parallelism
    positions = functools.partial(layouts.rank_positions, layer.layout, layer.seq_len, layer.context_parallelism)
    runs = 1 if layer.layout == "striped" else layouts.chunks_per_rank(layer.layout)
    key, value, key_positions = (
        jnp.split(rows, runs, axis=axis) for rows, axis in ((keys.key, 1), (keys.value, 1), (positions(owner), 0))
    )
    key_ids = [None] * runs if keys.segment_ids is None else jnp.split(keys.segment_ids, runs, axis=1)
    return [
        KernelOperands(
            operands.query,
            key[run],
            value[run],
            positions(rank),
            key_positions[run],
            operands.segment_ids,
            key_ids[run],
            operands.sinks if run == 0 else None,
        )
        for run in range(runs)
    ]


def _merged(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Joins partial results over disjoint keys: each weighs as much as its share of the joint sum of exponentials."""
    (one_out, one_lse), (other_out, other_lse) = one, other
    lse = jnp.logaddexp(one_lse, other_lse)
    finite_lse = jnp.where(jnp.isneginf(lse), 0, lse)
    one_share, other_share = (jnp.exp(part - finite_lse)[..., None] for part in (one_lse, other_lse))
    return one_out * one_share + other_out * other_share, lse
