"""Everything about one attention layer that is known while tracing, resolved and checked: what every strategy is given.

Plain frozen data, hashable, so that JAX keys its traces by it. Made by dispatch.py.
Tested in tests/impl/test_strategies.py.
"""

from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from impl.heads import HeadPlan
from impl.kernels.interface import KernelConfig


@dataclass(frozen=True)
class Layer:
    """One layer on one mesh. data_axis and tensor_axis are None where the mesh lacks them.

    ulysses_axis: the axis beside the context axis that the sequence lies on and heads are exchanged over, if any.

    kernel: name of the local kernel. kernel_config: the layer's mask and numerics, without a key_offset.
    halo_transfer: how a halo travels where kernel is pallas_halo.
    The specs are typed Any: `jax.shard_map` wants them in the place of arrays, in trees of the arrays' own types.
    """

    layout: str
    seq_len: int
    context_parallelism: int
    heads: HeadPlan
    kernel: str
    kernel_config: KernelConfig
    context_axis: str
    data_axis: str | None
    tensor_axis: str | None
    ulysses_axis: str | None = None
    ulysses_parallelism: int = 1
    halo_transfer: str = "permute"

    @property
    def _sequence_axes(self) -> str | tuple[str, str]:
        return self.context_axis if self.ulysses_axis is None else (self.context_axis, self.ulysses_axis)

    @property
    def query_spec(self) -> Any:
        """Of query, out and their cotangents: [batch, seq, heads, dim]."""
        return PartitionSpec(self.data_axis, self._sequence_axes, self.tensor_axis, None)

    @property
    def key_spec(self) -> Any:
        """Of key and value; their heads are replicated where the tensor axis does not divide them."""
        tensor_axis = self.tensor_axis if self.heads.kv_sharded else None
        return PartitionSpec(self.data_axis, self._sequence_axes, tensor_axis, None)

    @property
    def lse_spec(self) -> Any:
        """Of lse and its cotangent: [batch, seq, heads]."""
        return PartitionSpec(self.data_axis, self._sequence_axes, self.tensor_axis)

    @property
    def segment_ids_spec(self) -> Any:
        """Of segment ids: [batch, seq]."""
        return PartitionSpec(self.data_axis, self._sequence_axes)

    @property
    def sinks_spec(self) -> Any:
        """Of sinks: one a query head."""
        return PartitionSpec(self.tensor_axis)
