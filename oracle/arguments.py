"""What a caller may pass to the oracle, checked once and turned into float64 arrays.

Every other file of this package starts from `Arguments`; nothing here computes attention. NumPy and ml_dtypes only.
Tested in tests/oracle/test_arguments.py.
"""

import dataclasses
import math
import numbers
from typing import Any, Required, TypedDict

import numpy as np
from jaxtyping import Bool, Float64, Int64

Window = tuple[int | None, int | None]

# Dtypes whose every value float64 holds exactly (bfloat16 is registered with NumPy by ml_dtypes).
FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments that every oracle takes beside query, key and value (docs/semantics.md)."""

    window: Required[Window]
    """(left, right): keys visible before and after the query itself; None = unbounded, (W - 1, 0) = W keys."""
    segment_ids: np.ndarray | None
    """[batch, seq] integers, compared for equality only; None = one document."""
    padding_segment_id: int | None
    """The id of positions that are no tokens: they see nothing and nobody sees them. Needs segment_ids."""
    attn_logits_soft_cap: float | None
    """The cap of `cap * tanh(logits / cap)`; None = no cap."""
    sinks: np.ndarray | None
    """[num_query_heads]: one more logit per head in the denominator, uncapped and unscaled, with no value."""
    scale: float | None
    """The factor of the logits; None = 1 / sqrt(head_dim)."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """One attention problem with its data, in position order. `is_token` is False at padding, which nobody reads."""

    query: Float64[np.ndarray, "batch seq num_query_heads head_dim"]
    key: Float64[np.ndarray, "batch seq num_kv_heads head_dim"]
    value: Float64[np.ndarray, "batch seq num_kv_heads value_dim"]
    window: Window
    segment_ids: Int64[np.ndarray, "batch seq"]
    is_token: Bool[np.ndarray, "batch seq"]
    attn_logits_soft_cap: float | None
    sinks: Float64[np.ndarray, " num_query_heads"] | None
    scale: float

    @property
    def heads_per_group(self) -> int:
        """How many query heads read one kv head."""
        return self.query.shape[2] // self.key.shape[2]

    def heads_of(self, kv_head: int) -> slice:
        """The query heads that read this kv head."""
        return slice(kv_head * self.heads_per_group, (kv_head + 1) * self.heads_per_group)


@dataclasses.dataclass(frozen=True)
class Cotangents:
    """Cotangents of out and of lse; zero where the answer does not depend on anything."""

    dout: Float64[np.ndarray, "batch seq num_query_heads value_dim"]
    dlse: Float64[np.ndarray, "batch seq num_query_heads"]


def validated(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    window: Window,
    segment_ids: np.ndarray | None = None,
    padding_segment_id: int | None = None,
    attn_logits_soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    scale: float | None = None,
) -> Arguments:
    """The arguments of `oracle.attention` as float64, with the defaults of `AttentionOptions` filled in.

    Raises:
        ValueError: names the argument, its value and the rule it breaks.
    """
    query, key, value = (_float64(name, array, 4) for name, array in (("query", query), ("key", key), ("value", value)))
    _check_shapes(query.shape, key.shape, value.shape)
    batch, seq_len, num_query_heads, head_dim = query.shape
    segments, is_token = validated_segments(segment_ids, padding_segment_id, batch, seq_len)
    return Arguments(
        query=_without_padding("query", query, is_token),
        key=_without_padding("key", key, is_token),
        value=_without_padding("value", value, is_token),
        window=validated_window(window),
        segment_ids=segments,
        is_token=is_token,
        attn_logits_soft_cap=validated_soft_cap(attn_logits_soft_cap),
        sinks=validated_sinks(sinks, num_query_heads),
        scale=validated_scale(scale, head_dim),
    )


def validated_cotangents(arguments: Arguments, dout: np.ndarray, dlse: np.ndarray | None) -> Cotangents:
    """Cotangents as float64; a missing dlse is zero.

    Those of padding rows are dropped unread, save dlse where a sink makes lse depend on something.

    Raises:
        ValueError: names the argument, its value and the rule it breaks.
    """
    expected = (*arguments.query.shape[:3], arguments.value.shape[3])
    dout = _float64("dout", dout, 4)
    if dout.shape != expected:
        raise ValueError(f"dout must have the shape of out {expected}, got {dout.shape}")
    dlse = np.zeros(expected[:3]) if dlse is None else _float64("dlse", dlse, 3)
    if dlse.shape != expected[:3]:
        raise ValueError(f"dlse must have the shape of lse {expected[:3]}, got {dlse.shape}")
    everywhere = np.ones_like(arguments.is_token)
    return Cotangents(
        dout=_without_padding("dout", dout, arguments.is_token),
        dlse=_without_padding("dlse", dlse, arguments.is_token if arguments.sinks is None else everywhere),
    )


def validated_window(window: Any) -> Window:
    """`(left, right)`: keys visible before and after the query itself, None = unbounded."""
    if not isinstance(window, tuple) or len(window) != 2:
        raise ValueError(f"window must be a tuple (left, right), got {window!r}")
    for name, bound in zip(("left", "right"), window, strict=True):
        if bound is not None and (not _is_integer(bound) or bound < 0):
            raise ValueError(f"window {name} must be None or an integer >= 0, got {bound!r}")
    left, right = window
    return None if left is None else int(left), None if right is None else int(right)


def validated_segments(
    segment_ids: np.ndarray | None, padding_segment_id: int | None, batch: int, seq_len: int
) -> tuple[Int64[np.ndarray, "batch seq"], Bool[np.ndarray, "batch seq"]]:
    """Segment ids (all 0 where none are given) and which positions are tokens."""
    if segment_ids is None:
        if padding_segment_id is not None:
            raise ValueError(f"padding_segment_id needs segment_ids, got {padding_segment_id!r} without them")
        return np.zeros((batch, seq_len), np.int64), np.ones((batch, seq_len), bool)
    segments = np.asarray(segment_ids)
    if segments.dtype.kind not in "iu":
        raise ValueError(f"segment_ids must be integers, got dtype {segments.dtype}")
    if segments.shape != (batch, seq_len):
        raise ValueError(f"segment_ids must have shape [batch, seq] = {(batch, seq_len)}, got {segments.shape}")
    if padding_segment_id is not None and not _is_integer(padding_segment_id):
        raise ValueError(f"padding_segment_id must be None or an integer, got {padding_segment_id!r}")
    is_token = np.ones(segments.shape, bool) if padding_segment_id is None else segments != padding_segment_id
    return segments.astype(np.int64), is_token


def validated_soft_cap(attn_logits_soft_cap: Any) -> float | None:
    """The cap as a float, None = no cap."""
    if attn_logits_soft_cap is None:
        return None
    if not _is_finite_number(attn_logits_soft_cap) or attn_logits_soft_cap <= 0:
        raise ValueError(f"attn_logits_soft_cap must be None or a finite number > 0, got {attn_logits_soft_cap!r}")
    return float(attn_logits_soft_cap)


def validated_sinks(sinks: np.ndarray | None, num_query_heads: int) -> Float64[np.ndarray, " num_query_heads"] | None:
    """One logit per query head, None = no sinks."""
    if sinks is None:
        return None
    sinks = _float64("sinks", sinks, 1)
    if sinks.shape != (num_query_heads,):
        raise ValueError(f"sinks must have shape [num_query_heads] = {(num_query_heads,)}, got {sinks.shape}")
    if not np.isfinite(sinks).all():
        raise ValueError(f"sinks must be finite, got {sinks}")
    return sinks


def validated_scale(scale: Any, head_dim: int) -> float:
    """The factor of the logits, `1 / sqrt(head_dim)` by default."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not _is_finite_number(scale):
        raise ValueError(f"scale must be None or a finite number, got {scale!r}")
    return float(scale)


def _check_shapes(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> None:
    """Self-attention: the same batch rows and positions everywhere; query heads come in groups, one a kv head."""
    if 0 in query + key + value:
        raise ValueError(f"query, key and value must not be empty, got shapes {query}, {key}, {value}")
    if key[:2] != query[:2]:
        raise ValueError(f"key must have query's batch and seq {query[:2]}, got {key[:2]}")
    if key[3] != query[3]:
        raise ValueError(f"key must have query's head_dim {query[3]}, got {key[3]}")
    if value[:3] != key[:3]:
        raise ValueError(f"value must have key's batch, seq and num_kv_heads {key[:3]}, got {value[:3]}")
    if query[2] % key[2]:
        raise ValueError(f"num_query_heads must be a multiple of num_kv_heads, got {query[2]} and {key[2]}")


def _float64(name: str, array: Any, rank: int) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.name not in FLOAT_DTYPES:
        raise ValueError(f"{name} must have a dtype of {', '.join(FLOAT_DTYPES)}, got {array.dtype}")
    if array.ndim != rank:
        raise ValueError(f"{name} must have {rank} dimensions, got shape {array.shape}")
    return array.astype(np.float64)


def _without_padding(name: str, array: np.ndarray, is_read: Bool[np.ndarray, "batch seq"]) -> np.ndarray:
    """Zero in rows that nobody reads (they may hold anything, NaN too); every other row must be finite."""
    return checked_finite(name, np.where(is_read.reshape(is_read.shape + (1,) * (array.ndim - 2)), array, 0.0))


def checked_finite(name: str, array: np.ndarray) -> np.ndarray:
    """The array, if all of it is finite."""
    if not np.isfinite(array).all():
        index = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        raise ValueError(f"{name} must be finite where it is read, got {array[index]} at {index}")
    return array


def _is_integer(number: Any) -> bool:
    return isinstance(number, numbers.Integral) and not isinstance(number, bool)


def _is_finite_number(number: Any) -> bool:
    return isinstance(number, numbers.Real) and not isinstance(number, bool) and math.isfinite(number)
