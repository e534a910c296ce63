"""How positions lie on ranks: the permutation of each layout, and its inverse.

NumPy only, and plain index arithmetic of its own: `impl` reorders by other means, so that neither can hide the other's
mistake. Tested in tests/oracle/test_layout.py.
"""

import numbers

import numpy as np
from jaxtyping import Int64

LAYOUTS = ("contiguous", "dual_chunk_swap", "striped")


def permutation(layout: str, seq_len: int, context_parallelism: int) -> Int64[np.ndarray, " seq"]:
    """`permutation[i]` is the position of the token at index i of an array in this layout.

    `array_in_position_order[permutation]` is the array in layout order. Rank r holds the r-th of
    `context_parallelism` equal runs of indices.

    >>> permutation("dual_chunk_swap", 8, 2)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    >>> permutation("striped", 8, 2)
    array([0, 2, 4, 6, 1, 3, 5, 7])

    Raises:
        ValueError: for an unknown layout, or a seq_len that its chunks do not divide.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    _check_count("seq_len", seq_len)
    _check_count("context_parallelism", context_parallelism)
    chunks = 2 * context_parallelism if layout == "dual_chunk_swap" else context_parallelism
    if seq_len % chunks:
        raise ValueError(f"seq_len must be a multiple of {chunks} for layout {layout}, got {seq_len}")
    positions = np.arange(seq_len, dtype=np.int64)
    if layout == "contiguous":
        return positions
    if layout == "striped":
        return np.concatenate([positions[rank::context_parallelism] for rank in range(context_parallelism)])
    chunk = positions.reshape(chunks, seq_len // chunks)
    pairs = [(chunk[rank], chunk[chunks - 1 - rank]) for rank in range(context_parallelism)]
    return np.concatenate([np.concatenate(pair) for pair in pairs])


def inverse_permutation(layout: str, seq_len: int, context_parallelism: int) -> Int64[np.ndarray, " seq"]:
    """`inverse_permutation[p]` is the index, in this layout, of the token at position p.

    `array_in_layout_order[inverse_permutation]` is the array in position order.

    Raises:
        ValueError: as `permutation`.
    """
    inverse = np.empty(seq_len, np.int64)
    inverse[permutation(layout, seq_len, context_parallelism)] = np.arange(seq_len)
    return inverse


def _check_count(name: str, count: int) -> None:
    if not isinstance(count, numbers.Integral) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {count!r}")
