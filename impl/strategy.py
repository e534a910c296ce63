"""What a strategy is: two functions of one rank's rows inside shard_map, and the arrays that they are given.

Types only. sharded.py makes a differentiable function of global arrays out of them; tests/impl/test_strategies.py runs
it for every strategy.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float, Int32

from impl.kernels.interface import LocalGradients, RowCotangents
from impl.layer import Layer


class Operands(NamedTuple):
    """Global arrays of a layer, or one rank's shards of them. Absent inputs are None."""

    query: Float[Array, "batch seq num_query_heads head_dim"]
    key: Float[Array, "batch seq num_kv_heads head_dim"]
    value: Float[Array, "batch seq num_kv_heads value_dim"]
    segment_ids: Int32[Array, "batch seq"] | None
    sinks: Float[Array, " num_query_heads"] | None


class Received(NamedTuple):
    """What a strategy keeps of the rows that it received, for its backward; nothing, unless it says otherwise."""

    key: tuple[Float[Array, "batch received_rows num_kv_heads head_dim"], ...] = ()
    value: tuple[Float[Array, "batch received_rows num_kv_heads value_dim"], ...] = ()
    segment_ids: tuple[Int32[Array, "batch received_rows"], ...] = ()
    query: tuple[Float[Array, "batch received_rows num_query_heads head_dim"], ...] = ()


class Strategy(NamedTuple):
    """How K and V reach the query, as two functions of one rank's rows inside shard_map.

    forward(operands, layer) -> (out, lse, received), out in the accumulation dtype.
    backward(operands, received, cotangents, layer) -> LocalGradients for this rank's own rows, in the accumulation
        dtype, everything that other ranks owe them included; dsinks is this rank's share. What nothing is added to any
        more may have been rounded to the inputs' dtype.
    adds_out: whether the backward takes `cotangents.out`, and adds its share to delta itself.
    """

    forward: Callable[[Operands, Layer], tuple[Array, Array, Received]]
    backward: Callable[[Operands, Received, RowCotangents, Layer], LocalGradients]
    adds_out: bool = False
