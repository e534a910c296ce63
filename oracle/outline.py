"""A case without its long arrays, and the blocks that can be cut from it by reading a few rows.

What the probe oracle works on: the caller's function makes rows on demand, so that no array of the whole sequence is
ever formed (segment ids excepted). NumPy only. Tested in tests/oracle/test_probe.py and test_sinks.py.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float64, Int64

from oracle.arguments import (
    Window,
    checked_finite,
    validated_scale,
    validated_segments,
    validated_sinks,
    validated_soft_cap,
    validated_window,
)
from oracle.dense import Block
from oracle.mask import visible_pairs

Positions = Int64[np.ndarray, " rows"]

Rows = Callable[[str, int, Positions, slice], np.ndarray]
"""`rows(tensor, batch_row, positions, heads)` reads one tensor of the case: [rows, heads, dim] of "query", "key",
"value" or "dout", or [rows, heads] of "dlse", in any float dtype."""


@dataclasses.dataclass(frozen=True)
class Outline:
    """A case without its long arrays. The options are those of `oracle.AttentionOptions`."""

    batch: int
    seq_len: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    window: Window
    segment_ids: np.ndarray | None = None  # [batch, seq]
    padding_segment_id: int | None = None
    attn_logits_soft_cap: float | None = None
    sinks: np.ndarray | None = None  # [num_query_heads]
    scale: float | None = None


@dataclasses.dataclass(frozen=True)
class Reader:
    """An outline whose options are validated and filled in, with the rows of its arrays within reach."""

    rows: Rows
    seq_len: int
    group: int  # query heads that share a kv head
    window: Window
    segment_ids: Int64[np.ndarray, "batch seq"]
    is_token: Bool[np.ndarray, "batch seq"]
    attn_logits_soft_cap: float | None
    sinks: Float64[np.ndarray, " num_query_heads"] | None
    scale: float

    def heads_of(self, kv_head: int) -> slice:
        """The query heads that read this kv head."""
        return slice(kv_head * self.group, (kv_head + 1) * self.group)

    def seen_by(self, queries: Positions) -> Positions:
        """The run of positions that holds every key in the windows of these queries (in ascending order)."""
        left, right = self.window
        return self._run(queries, left, right)

    def readers_of(self, row: int, keys: Positions) -> Positions:
        """The queries that see one of these keys (in ascending order), and those at the keys' own positions."""
        left, right = self.window
        queries = self._run(keys, right, left)
        return queries[self.visible(row, queries, keys).any(axis=1) | np.isin(queries, keys)]

    def visible(self, row: int, queries: Positions, keys: Positions) -> Bool[np.ndarray, "query key"]:
        """Who sees whom."""
        return visible_pairs(queries, keys, self.window, self.segment_ids[row], self.is_token[row])

    def read(self, tensor: str, row: int, positions: Positions, heads: slice) -> Float64[np.ndarray, "rows heads *dim"]:
        """Rows as float64. Those of padding may hold anything and become zero, as nothing depends on them, save dlse
        where a sink makes lse depend on something."""
        array = np.asarray(self.rows(tensor, row, positions, heads)).astype(np.float64)
        if tensor != "dlse" or self.sinks is None:
            array[~self.is_token[row, positions]] = 0.0
        return checked_finite(tensor, array)

    def block(self, row: int, heads: slice, queries: Positions, also: Positions) -> tuple[Block, Positions]:
        """These queries of some heads that share a kv head, with the keys that one of them sees and the keys at `also`;
        and where those keys are."""
        keys = np.union1d(self.seen_by(queries), also)
        visible = self.visible(row, queries, keys)
        is_wanted = visible.any(axis=0) | np.isin(keys, also)
        keys, visible = keys[is_wanted], visible[:, is_wanted]
        kv_head = heads.start // self.group
        kv_heads = slice(kv_head, kv_head + 1)
        block = Block(
            query=self.read("query", row, queries, heads).swapaxes(0, 1),
            key=self.read("key", row, keys, kv_heads)[:, 0],
            value=self.read("value", row, keys, kv_heads)[:, 0],
            visible=visible,
            sinks=np.full(heads.stop - heads.start, -np.inf) if self.sinks is None else self.sinks[heads],
            attn_logits_soft_cap=self.attn_logits_soft_cap,
            scale=self.scale,
        )
        return block, keys

    def cotangents(
        self, row: int, heads: slice, queries: Positions
    ) -> tuple[Float64[np.ndarray, "group query value_dim"], Float64[np.ndarray, "group query"]]:
        """dout and dlse of these queries of some heads."""
        return self.read("dout", row, queries, heads).swapaxes(0, 1), self.read("dlse", row, queries, heads).T

    def _run(self, positions: Positions, before: int | None, after: int | None) -> Positions:
        first = 0 if before is None else max(0, int(positions[0]) - before)
        end = self.seq_len if after is None else min(self.seq_len, int(positions[-1]) + after + 1)
        return np.arange(first, end)


def reader(rows: Rows, outline: Outline) -> Reader:
    """Validate an outline as `oracle.attention` does its arguments.

    Raises:
        ValueError: names the argument, its value and the rule it breaks.
    """
    for name in ("batch", "seq_len", "num_query_heads", "num_kv_heads", "head_dim"):
        if getattr(outline, name) < 1:
            raise ValueError(f"{name} must be >= 1, got {getattr(outline, name)}")
    if outline.num_query_heads % outline.num_kv_heads:
        counts = f"{outline.num_query_heads} and {outline.num_kv_heads}"
        raise ValueError(f"num_query_heads must be a multiple of num_kv_heads, got {counts}")
    segment_ids, is_token = validated_segments(
        outline.segment_ids, outline.padding_segment_id, outline.batch, outline.seq_len
    )
    return Reader(
        rows=rows,
        seq_len=outline.seq_len,
        group=outline.num_query_heads // outline.num_kv_heads,
        window=validated_window(outline.window),
        segment_ids=segment_ids,
        is_token=is_token,
        attn_logits_soft_cap=validated_soft_cap(outline.attn_logits_soft_cap),
        sinks=validated_sinks(outline.sinks, outline.num_query_heads),
        scale=validated_scale(outline.scale, outline.head_dim),
    )
