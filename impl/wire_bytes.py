"""How many bytes a layer's strategy brings to a rank, forward and backward: exact, from plans and shapes alone.

Touches no arrays. Tested in tests/impl/wire/test_wire_bytes.py against what traced programs send; docs/strategies.md
has a table of them.
"""

from dataclasses import dataclass, replace

from impl.exchange import HaloPlan, halo_plan
from impl.heads import plan_heads
from impl.ring import rotations

WIDE = 4
"""Bytes of a gradient on the wire: float32."""
ID = 4
"""Bytes of a segment id."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One layer on a mesh of context ranks alone: shapes, window, bytes of an element of query, key and value.

    With `ulysses_parallelism` > 1 its model's global strategy is usp: the sequence lies on context × ulysses ranks.
    """

    strategy: str
    layout: str
    context_parallelism: int
    seq_len: int
    window: tuple[int | None, int | None]
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    ulysses_parallelism: int = 1
    itemsize: int = 2
    batch: int = 1
    has_segment_ids: bool = False

    @property
    def rows(self) -> int:
        """Rows of a rank."""
        return self.seq_len // (self.context_parallelism * self.ulysses_parallelism)


@dataclass(frozen=True)
class WireBytes:
    """Bytes that arrive at the rank that receives most."""

    forward: int
    backward: int


def wire_bytes(shape: LayerShape) -> WireBytes:
    """What `impl.attention` and its VJP bring to a rank. dsinks (4 bytes a query head) is left out.

    `ValueError` for a strategy that does not exist.
    """
    counters = {"halo": _halo, "all_gather": _all_gather, "ring": _ring, "ulysses": _ulysses, "usp": _ring}
    if shape.strategy not in counters:
        raise ValueError(f"strategy must be one of {', '.join(counters)}, got {shape.strategy!r}")
    exchange = (0, 0)
    if shape.ulysses_parallelism > 1:
        exchange, shape = _head_exchange(shape, shape.ulysses_parallelism)
    forward, backward = counters[shape.strategy](shape)
    return WireBytes(shape.batch * (exchange[0] + forward), shape.batch * (exchange[1] + backward))


def _key_row(shape: LayerShape, itemsize: int) -> int:
    return shape.num_kv_heads * (shape.head_dim + shape.value_dim) * itemsize


def _ids(shape: LayerShape) -> int:
    return ID if shape.has_segment_ids else 0


def _halo(shape: LayerShape) -> tuple[int, int]:
    plan = halo_plan(shape.layout, shape.context_parallelism, shape.seq_len, shape.window)
    ranks = range(shape.context_parallelism)
    received = max(plan.rows_received(rank) for rank in ranks)
    sent = max(_rows_sent(plan, rank) for rank in ranks)
    # The gradients of what a rank sent come back to it.
    return received * (_key_row(shape, shape.itemsize) + _ids(shape)), sent * _key_row(shape, WIDE)


def _rows_sent(plan: HaloPlan, rank: int) -> int:
    return sum(permute.rows for permute in plan.permutes for source, _ in permute.pairs if source == rank)


def _all_gather(shape: LayerShape) -> tuple[int, int]:
    others = (shape.context_parallelism - 1) * shape.rows
    gathered = others * (_key_row(shape, shape.itemsize) + _ids(shape))
    # Gathered again in the backward; then each rank receives every other rank's gradients of its rows.
    return gathered, gathered + others * _key_row(shape, WIDE)


def _ring(shape: LayerShape) -> tuple[int, int]:
    steps = sum(rotations(shape.layout, shape.context_parallelism, shape.seq_len, shape.window))
    passed = steps * shape.rows * (_key_row(shape, shape.itemsize) + _ids(shape))
    return passed, passed + steps * shape.rows * _key_row(shape, WIDE)


def _ulysses(shape: LayerShape) -> tuple[int, int]:
    received, _ = _head_exchange(shape, shape.context_parallelism)
    return received


def _head_exchange(shape: LayerShape, size: int) -> tuple[tuple[int, int], LayerShape]:
    """What an exchange of heads over `size` ranks brings to one of them, and the layer that it leaves to each."""
    heads = plan_heads(shape.num_query_heads, shape.num_kv_heads, size)
    kv_heads = heads.shard_kv_heads if heads.aligned else heads.shard_query_heads
    others = (size - 1) * shape.rows
    dims = shape.head_dim + shape.value_dim
    query, key = others * heads.shard_query_heads, others * kv_heads
    ids = others * _ids(shape)
    # query and out; lse; key and value.
    forward = query * (dims * shape.itemsize + WIDE) + key * dims * shape.itemsize + ids
    # dout and dquery; lse and delta; dkey and dvalue.
    backward = query * (dims * shape.itemsize + 2 * WIDE) + key * dims * WIDE
    inner = replace(shape, num_query_heads=heads.shard_query_heads, num_kv_heads=kv_heads, ulysses_parallelism=1)
    return (forward, backward), inner
