"""Every shard of query heads works with exactly the kv heads that its query heads read, for every head count."""

import jax.numpy as jnp
import numpy as np
import pytest

from impl import heads

COUNTS = [
    (num_query_heads, num_kv_heads, tensor_parallelism)
    for num_query_heads in (1, 2, 4, 6, 8, 12, 24)
    for num_kv_heads in (1, 2, 3, 4, 5, 6, 8)
    for tensor_parallelism in (1, 2, 3, 4, 8)
    if num_query_heads % num_kv_heads == 0 and num_query_heads % tensor_parallelism == 0
]


@pytest.mark.parametrize("tensor_parallelism", [1, 2, 3, 4, 8])
def test_each_query_head_is_given_its_own_kv_head(tensor_parallelism) -> None:
    for num_query_heads, num_kv_heads, shards in COUNTS:
        if shards != tensor_parallelism:
            continue
        plan = heads.plan_heads(num_query_heads, num_kv_heads, shards)
        named = jnp.arange(num_kv_heads).reshape(1, 1, -1, 1)  # Every kv head holds its own index.
        for shard in range(shards):
            given = named if not plan.kv_sharded else jnp.split(named, shards, axis=2)[shard]
            selected = heads.select(given, plan, jnp.int32(shard))
            assert selected.shape[2] == plan.shard_kv_heads, "the plan states how many kv heads a shard works with"
            expanded = np.asarray(heads.expand(selected, plan, jnp.int32(shard))).ravel()
            per_query_head = np.repeat(expanded, plan.shard_query_heads // len(expanded))
            first = shard * plan.shard_query_heads
            expected = np.arange(first, first + plan.shard_query_heads) // (num_query_heads // num_kv_heads)
            assert np.array_equal(per_query_head, expected), f"shard {shard} of {plan}"


def test_a_shard_selects_no_more_kv_heads_than_it_reads() -> None:
    assert heads.plan_heads(8, 2, 4).shard_kv_heads == 1, "two shards share a kv head, none needs both"
    assert heads.plan_heads(12, 6, 4).shard_kv_heads == 2, "three query heads of groups of two read two kv heads"
