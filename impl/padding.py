"""Sequences that do not divide into chunks: pads them with positions that are no tokens, and takes these off again.

Padding goes to the end, in position order, before `impl.reorder`; attention must then be given the padded segment ids
and their `padding_segment_id`. Tested in tests/impl/test_padding.py.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from impl import layout as layouts


def padded_length(seq_len: int, *, layout: str, context_parallelism: int, ulysses_parallelism: int = 1) -> int:
    """The shortest length from `seq_len` on that every rank gets equal chunks of. `ValueError` for sizes below 1."""
    if layout not in layouts.LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(layouts.LAYOUTS)}, got {layout!r}")
    for name, size in (
        ("seq_len", seq_len),
        ("context_parallelism", context_parallelism),
        ("ulysses_parallelism", ulysses_parallelism),
    ):
        if size < 1:
            raise ValueError(f"{name} must be >= 1, got {size}")
    multiple = context_parallelism * ulysses_parallelism * (2 if layout == "dual_chunk_swap" else 1)
    return -(-seq_len // multiple) * multiple


def pad_sequence(array: Shaped[Array, "batch seq_len ..."], length: int) -> Shaped[Array, "batch length ..."]:
    """Appends zeros along axis 1 up to `length`. `ValueError` if the array is longer: nothing is ever cut off."""
    seq_len = array.shape[1]
    if seq_len > length:
        raise ValueError(f"length must be at least the array's own {seq_len}, got {length}")
    return jnp.pad(array, [(0, 0), (0, length - seq_len)] + [(0, 0)] * (array.ndim - 2))


def pad_segment_ids(
    segment_ids: Int32[Array, "batch seq_len"], length: int, padding_segment_id: int
) -> Int32[Array, "batch length"]:
    """Appends `padding_segment_id`; of a sequence without documents, pass zeros. `ValueError` as `pad_sequence`."""
    seq_len = segment_ids.shape[1]
    if seq_len > length:
        raise ValueError(f"length must be at least the segment ids' own {seq_len}, got {length}")
    return jnp.pad(segment_ids, ((0, 0), (0, length - seq_len)), constant_values=padding_segment_id)


def unpad_sequence(array: Shaped[Array, "batch length ..."], seq_len: int) -> Shaped[Array, "batch seq_len ..."]:
    """The first `seq_len` rows along axis 1, in position order. `ValueError` if there are fewer."""
    if seq_len > array.shape[1]:
        raise ValueError(f"seq_len must be at most the array's {array.shape[1]}, got {seq_len}")
    return array[:, :seq_len]
