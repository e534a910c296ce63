"""Which key/value heads a shard of query heads works with when heads are sharded over the tensor axis.

Query head h reads kv head `h // (num_query_heads // num_kv_heads)`. Where the tensor axis does not divide the kv heads
they are replicated, and each shard selects those that its query heads read. Tested in tests/impl/test_heads.py.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Shaped


@dataclass(frozen=True)
class HeadPlan:
    """Head counts, in total and of one tensor shard.

    kv_sharded: the tensor axis divides the kv heads, so each shard is given its own; otherwise all are given to all.
    shard_kv_heads: kv heads that a shard works with after `select`.
    aligned: every selected kv head is read by equally many of the shard's query heads, in order; otherwise the kernel
        needs one kv head a query head (`expand`).
    """

    num_query_heads: int
    num_kv_heads: int
    tensor_parallelism: int
    kv_sharded: bool
    shard_kv_heads: int
    aligned: bool

    @property
    def shard_query_heads(self) -> int:
        """Query heads of one tensor shard."""
        return self.num_query_heads // self.tensor_parallelism

    @property
    def group(self) -> int:
        """Query heads that read one kv head."""
        return self.num_query_heads // self.num_kv_heads


def plan_heads(num_query_heads: int, num_kv_heads: int, tensor_parallelism: int) -> HeadPlan:
    """The head plan for counts that divide: query heads by kv heads and by tensor shards (checked by the caller)."""
    if num_kv_heads % tensor_parallelism == 0:
        shard_kv_heads = num_kv_heads // tensor_parallelism
        return HeadPlan(num_query_heads, num_kv_heads, tensor_parallelism, True, shard_kv_heads, True)
    group, shard = num_query_heads // num_kv_heads, num_query_heads // tensor_parallelism
    spans = [((index + 1) * shard - 1) // group - index * shard // group + 1 for index in range(tensor_parallelism)]
    return HeadPlan(num_query_heads, num_kv_heads, tensor_parallelism, False, max(spans), max(spans) == 1)


def select(
    heads: Shaped[Array, "batch rows num_kv_heads dim"], plan: HeadPlan, shard: Int32[Array, ""]
) -> Shaped[Array, "batch rows shard_kv_heads dim"]:
    """The run of kv heads that the query heads of tensor shard `shard` read; linear in `heads`."""
    if plan.kv_sharded:
        return heads
    return lax.dynamic_slice_in_dim(heads, _first_kv_head(plan, shard), plan.shard_kv_heads, axis=2)


def expand(
    heads: Shaped[Array, "batch rows shard_kv_heads dim"], plan: HeadPlan, shard: Int32[Array, ""]
) -> Shaped[Array, "batch rows kernel_kv_heads dim"]:
    """What the local kernel is given: selected heads, or one a query head where group borders cut through shards."""
    if plan.aligned:
        return heads
    query_heads = shard * plan.shard_query_heads + jnp.arange(plan.shard_query_heads, dtype=jnp.int32)
    return jnp.take(heads, query_heads // plan.group - _first_kv_head(plan, shard), axis=2, mode="clip")


def _first_kv_head(plan: HeadPlan, shard: Int32[Array, ""]) -> Int32[Array, ""]:
    # A run of equal length on every shard may start early on the last one, where it would pass the end.
    first = shard * plan.shard_query_heads // plan.group
    return jnp.minimum(first, plan.num_kv_heads - plan.shard_kv_heads)
