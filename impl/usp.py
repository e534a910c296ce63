"""The usp strategy: ulysses along one mesh axis, a ring along another; the sequence lies on both.

Heads are exchanged over the ulysses axis (head_exchange.py), so that each rank of the ring has all rows of its share;
K and V then rotate along the context axis (ring.py). Tested in tests/impl/test_strategies.py.
"""

from jax.sharding import Mesh
from jaxtyping import Array

from impl import ring
from impl.layer import Layer
from impl.sharded import sharded_attention
from impl.strategy import Operands


def usp(operands: Operands, layer: Layer, mesh: Mesh) -> tuple[Array, Array]:
    """Attention of global arrays whose sequence is sharded over (context, ulysses); returns (out, lse).

    The layout is that of the context axis alone: rank r of the ring holds chunks r and 2N − 1 − r, cut evenly along
    the ulysses axis. In a layer with a ulysses axis `sharded_attention` puts the head exchange around any strategy.
    """
    return sharded_attention(operands, ring.STRATEGY, layer, mesh)
