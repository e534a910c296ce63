"""Context parallelism for kernels that know nothing of it: each rank's queries against all keys, gathered.

Shared by the adapters of public kernels in this folder. May touch: JAX. Tests: tests/conformance/test_targets.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from conformance.problem import Problem

# The segment id that padding keys get. Every int32 may be an id of a document; this one is of no case that is drawn.
PADDING_KEY_ID = -1_933_715_401


@dataclass(frozen=True)
class Rows:
    """One rank's queries, and all keys of their sequence; `distance` is how far each key lies before each query.

    Segment ids of queries and of keys are equal only where the semantics let them see each other: padding has its own.
    """

    query: Float[Array, "batch query_rows num_query_heads head_dim"]
    key: Float[Array, "batch key_rows num_kv_heads head_dim"]
    value: Float[Array, "batch key_rows num_kv_heads value_dim"]
    distance: Int32[Array, "query_rows key_rows"]
    query_ids: Int32[Array, "batch query_rows"]
    key_ids: Int32[Array, "batch key_rows"]
    sinks: Float[Array, " num_query_heads"] | None


Attend = Callable[[Rows, Any], Float[Array, "batch query_rows num_query_heads value_dim"]]


@dataclass(frozen=True)
class Kernel:
    """What `attend` is given besides the rows: a pytree, and its placement over the mesh (in shard_map's words)."""

    operand: Any = None
    spec: Any = None

    def placed(self, mesh: jax.sharding.Mesh) -> Any:
        """The operand where its spec says: Explicit axes take it from nowhere else."""

        def place(spec: PartitionSpec, array: Any) -> Any:
            return jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))

        return jax.tree.map(place, self.spec, self.operand, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def attention_on_gathered_keys(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    problem: Problem,
    mesh: jax.sharding.Mesh,
    attend: Attend,
    kernel: Kernel = Kernel(),
    segment_ids: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """out, by the target contract: `attend` on every rank, with its part of the kernel's operand."""
    sequence = sequence_axes(problem)
    arrays, rows = PartitionSpec("data", sequence, "tensor"), PartitionSpec("data", sequence)
    placed = jax.sharding.NamedSharding(mesh, rows)
    if segment_ids is None:
        segment_ids = jax.device_put(jnp.zeros(query.shape[:2], jnp.int32), placed)
    else:
        require_ids_of_rows(segment_ids, query)
    order = jax.device_put(jnp.asarray(problem.positions()), jax.sharding.NamedSharding(mesh, PartitionSpec(sequence)))
    optional = {} if sinks is None else {"sinks": sinks}

    def on_one_rank(query: Any, key: Any, value: Any, ids: Any, order: Any, optional: Any, operand: Any) -> Any:
        # Wide on the wire: the transpose of gathering sums gradients over ranks in the dtype that was gathered.
        wide = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (key, value))
        key, value = (jax.lax.all_gather(x, sequence, axis=1, tiled=True).astype(query.dtype) for x in wide)
        key_ids = jax.lax.all_gather(ids, sequence, axis=1, tiled=True)
        distance = order[:, None] - jax.lax.all_gather(order, sequence, tiled=True)[None, :]
        query_ids, key_ids = ids_that_tell_padding_apart(problem, ids, key_ids)
        return attend(Rows(query, key, value, distance, query_ids, key_ids, optional.get("sinks")), operand)

    sharded = jax.shard_map(
        on_one_rank,
        mesh=mesh,
        in_specs=(arrays, arrays, arrays, rows, PartitionSpec(sequence), PartitionSpec("tensor"), kernel.spec),
        out_specs=arrays,
        check_vma=False,
    )
    return sharded(query, key, value, segment_ids, order, optional, kernel.placed(mesh))


def sequence_axes(problem: Problem) -> str | tuple[str, str]:
    """The mesh axes that the sequence lies on."""
    return ("context", "ulysses") if problem.ulysses_parallelism > 1 else "context"


def require_ids_of_rows(segment_ids: jax.Array, query: jax.Array) -> None:
    """Kernels slice what they are given: of too many ids they would take the first without a word.

    Raises:
        ValueError: not one id for each batch row and position.
    """
    if segment_ids.shape != query.shape[:2]:
        raise ValueError(f"segment_ids must have shape {query.shape[:2]}, as query has rows, got {segment_ids.shape}")


def declined_problem(problem: Problem) -> str | None:
    """Why every adapter of this folder declines a problem, if it does."""
    if problem.window[0] is not None and problem.window[0] < 0:
        return f"a window of {problem.window[0] + 1} keys shows nobody anything"
    if problem.axis_types == "mixed":
        # jax 0.12 then gathers over the data axis too: the check of collectives sees it, and nothing here asks for it.
        return "beside Explicit axes the compiler chooses where this adapter's arrays lie along Auto ones"
    if problem.num_kv_heads % problem.tensor_parallelism:
        return "this adapter shards kv heads over the tensor axis"
    return None


def ids_that_tell_padding_apart(
    problem: Problem, query_ids: jax.Array, key_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The ids, with PADDING_KEY_ID for padding keys: kernels compare ids, and know no padding.

    It is the same on every rank, so that keys may travel.
    """
    if problem.padding is None:
        return query_ids, key_ids
    return query_ids, jnp.where(key_ids == problem.padding, PADDING_KEY_ID, key_ids)


def in_window(problem: Problem, distance: Any) -> Any:
    """Which of the keys that lie `distance` before their query are in its window; NumPy and JAX arrays alike."""
    left, right = problem.window
    mask = distance == distance
    if left is not None:
        mask &= distance <= left
    if right is not None:
        mask &= distance >= -right
    return mask
