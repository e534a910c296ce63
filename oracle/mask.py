"""Which keys a query sees: the window over positions, equal segment ids, and no padding.

NumPy only; knows nothing of ranks or layouts (arrays are in position order). Tested in tests/oracle/test_mask.py.
"""

import numbers
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from oracle.arguments import Window, validated_segments, validated_window


def visible(
    seq_len: int,
    *,
    window: Window,
    segment_ids: np.ndarray | None = None,
    padding_segment_id: int | None = None,
) -> Bool[np.ndarray, "batch query key"]:
    """Who sees whom, `visible[b, q, k]`, for self-attention over `seq_len` positions.

    Without `segment_ids` ([batch, seq], integers) the batch axis has length 1.

    >>> visible(4, window=(1, 0))[0].astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 1, 1, 0],
           [0, 0, 1, 1]])

    Raises:
        ValueError: names the argument, its value and the rule it breaks.
    """
    window = validated_window(window)
    batch = 1 if segment_ids is None else len(segment_ids)
    segments, is_token = validated_segments(segment_ids, padding_segment_id, batch, seq_len)
    positions = np.arange(seq_len)
    rows = [visible_pairs(positions, positions, window, segments[b], is_token[b]) for b in range(batch)]
    return np.stack(rows)


def visible_pairs(
    query_positions: Int64[np.ndarray, " query"],
    key_positions: Int64[np.ndarray, " key"],
    window: Window,
    segment_ids: Int64[np.ndarray, " seq"],
    is_token: Bool[np.ndarray, " seq"],
) -> Bool[np.ndarray, "query key"]:
    """The same for chosen positions of one batch row (whose segment ids and tokens are given whole)."""
    distance = key_positions[None, :] - query_positions[:, None]
    same_segment = segment_ids[query_positions][:, None] == segment_ids[key_positions][None, :]
    both_tokens = is_token[query_positions][:, None] & is_token[key_positions][None, :]
    return within_window(distance, window) & same_segment & both_tokens


def within_window(distance: Int64[np.ndarray, "..."], window: Window) -> Bool[np.ndarray, "..."]:
    """`-left <= key position - query position <= right`."""
    left, right = window
    inside = np.ones(distance.shape, bool)
    if left is not None:
        inside &= distance >= -left
    if right is not None:
        inside &= distance <= right
    return inside


def most_visible(window: Window, seq_len: int) -> int:
    """The most keys that a query sees, and so the most queries that see a key."""
    left, right = (seq_len if bound is None else bound for bound in window)
    return min(seq_len, left + right + 1)


def window_of(sliding_window_size: Any) -> Window:
    """The window of a layer that sees `sliding_window_size` keys, the query's own included: `(size - 1, 0)`.

    Raises:
        ValueError: if the size is not an integer >= 1.
    """
    is_integer = isinstance(sliding_window_size, numbers.Integral) and not isinstance(sliding_window_size, bool)
    if not is_integer or sliding_window_size < 1:
        raise ValueError(f"sliding_window_size must be an integer >= 1, got {sliding_window_size!r}")
    return int(sliding_window_size) - 1, 0
