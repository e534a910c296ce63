"""Where positions lie: the layouts of a sequence over ranks, and reordering arrays between them under jit.

Plain shape arithmetic; knows nothing of attention, windows or meshes. Tested in tests/impl/test_layout.py.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Int32, Shaped

if TYPE_CHECKING:
    from jax.typing import ArrayLike

LAYOUTS = ("contiguous", "dual_chunk_swap", "striped")


def reorder(array: Shaped[Array, "..."], *, axis: int, layout: str, context_parallelism: int) -> Shaped[Array, "..."]:
    """Brings `axis` from position order into the order of `layout`: equal splits of it are then what each rank holds.

    Compiles to slices, reshapes and concatenations: a gather of this size becomes a sequential loop on TPU. Along
    Explicit axes of a mesh the result lies as the array does. `ValueError` if the layout is unknown or the axis does
    not divide into its chunks.
    """
    _check_layout(array, axis, layout, context_parallelism)
    return _placed_alike(array, lambda rows: _reordered(rows, axis, layout, context_parallelism))


def restore(array: Shaped[Array, "..."], *, axis: int, layout: str, context_parallelism: int) -> Shaped[Array, "..."]:
    """The inverse of `reorder`: brings `axis` from the order of `layout` back into position order."""
    _check_layout(array, axis, layout, context_parallelism)
    return _placed_alike(array, lambda rows: _restored(rows, axis, layout, context_parallelism))


def _placed_alike(array: Array, move: Callable[[Array], Array]) -> Array:
    """The moved array. Along Explicit axes JAX asks where each step's result lies: only that of the last matters."""
    sharding = jax.typeof(array).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return move(array)
    along_auto: Any = jax.sharding.auto_axes(move, out_sharding=sharding)
    return along_auto(array)


def _reordered(array: Array, axis: int, layout: str, context_parallelism: int) -> Array:
    if layout == "dual_chunk_swap":
        low, high = jnp.split(_grouped(array, axis, (2, context_parallelism)), 2, axis=_front(array, axis))
        pairs = jnp.concatenate([low, jnp.flip(high, axis=_front(array, axis) + 1)], axis=_front(array, axis))
        return jnp.swapaxes(pairs, _front(array, axis), _front(array, axis) + 1).reshape(array.shape)
    if layout == "striped":
        rows = array.shape[axis] // context_parallelism
        return _transposed(array, axis, (rows, context_parallelism))
    return array


def _restored(array: Array, axis: int, layout: str, context_parallelism: int) -> Array:
    if layout == "dual_chunk_swap":
        low, high = jnp.split(_grouped(array, axis, (context_parallelism, 2)), 2, axis=_front(array, axis) + 1)
        halves = jnp.concatenate([low, jnp.flip(high, axis=_front(array, axis))], axis=_front(array, axis) + 1)
        return jnp.swapaxes(halves, _front(array, axis), _front(array, axis) + 1).reshape(array.shape)
    if layout == "striped":
        rows = array.shape[axis] // context_parallelism
        return _transposed(array, axis, (context_parallelism, rows))
    return array


def rank_positions(layout: str, seq_len: int, context_parallelism: int, rank: "ArrayLike") -> Int32[Array, " rows"]:
    """The positions of one rank's rows, in the order in which it holds them; `rank` may be traced."""
    rows = seq_len // context_parallelism
    index = jnp.arange(rows, dtype=jnp.int32)
    rank = jnp.asarray(rank, jnp.int32)
    if layout == "contiguous":
        return rank * rows + index
    if layout == "striped":
        return rank + context_parallelism * index
    chunk = rows // 2
    low = rank * chunk + index[:chunk]
    high = (2 * context_parallelism - 1 - rank) * chunk + index[:chunk]
    return jnp.concatenate([low, high])


def all_positions(layout: str, seq_len: int, context_parallelism: int) -> Int32[Array, " seq_len"]:
    """The position of every index in the layout, rank after rank, computed on the device (no constant of size S)."""
    ranks = jnp.arange(context_parallelism, dtype=jnp.int32)
    by_rank = jax.vmap(lambda rank: rank_positions(layout, seq_len, context_parallelism, rank))(ranks)
    return by_rank.reshape(seq_len)


def chunks_per_rank(layout: str) -> int:
    """How many contiguous runs of positions a rank holds; striped has no chunks and is refused."""
    if layout not in ("contiguous", "dual_chunk_swap"):
        raise ValueError(f"layout must be contiguous or dual_chunk_swap to have chunks, got {layout!r}")
    return 2 if layout == "dual_chunk_swap" else 1


def chunk_of(context_parallelism: int, rank: Any, slot: int) -> Any:
    """Index of the chunk that `rank` (an int, or traced) holds in `slot`; slot 1 is dual_chunk_swap's high chunk."""
    return rank if slot == 0 else 2 * context_parallelism - 1 - rank


def owner_of(layout: str, context_parallelism: int, chunk: int) -> tuple[int, int]:
    """The `(rank, slot)` that holds a chunk."""
    if layout == "dual_chunk_swap" and chunk >= context_parallelism:
        return 2 * context_parallelism - 1 - chunk, 1
    return chunk, 0


def _check_layout(array: Array, axis: int, layout: str, context_parallelism: int) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if context_parallelism < 1:
        raise ValueError(f"context_parallelism must be >= 1, got {context_parallelism}")
    pieces = context_parallelism * (2 if layout == "dual_chunk_swap" else 1)
    if array.shape[axis] % pieces:
        raise ValueError(
            f"axis {axis} of length {array.shape[axis]} must divide into {pieces} equal pieces for layout {layout!r}"
        )


def _front(array: Array, axis: int) -> int:
    return axis % array.ndim


def _grouped(array: Array, axis: int, groups: tuple[int, ...]) -> Array:
    """Splits `axis` into `groups` and what is left, in place."""
    axis = _front(array, axis)
    return array.reshape(*array.shape[:axis], *groups, -1, *array.shape[axis + 1 :])


def _transposed(array: Array, axis: int, groups: tuple[int, int]) -> Array:
    """Reads `axis` as a matrix of shape `groups` and lays it out by columns."""
    axis = _front(array, axis)
    matrix = array.reshape(*array.shape[:axis], *groups, *array.shape[axis + 1 :])
    return jnp.swapaxes(matrix, axis, axis + 1).reshape(array.shape)
