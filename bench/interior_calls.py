"""The interior calls of the Pallas halo kernels of one local layer, as the benches compile them: 128K tokens, 8 ranks.

Imports JAX when called only: libtpu reads its environment once. May touch: impl.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

ROWS = 131072 // 8


class LayerHeads(NamedTuple):
    """`head_dim` in whole lanes, `window` as W: the query itself is one of its keys."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    window: int


ShapesAndDtypes = list[tuple[tuple[int, ...], Any]]


def interior_calls(
    layer: LayerHeads, block: int, tile: int, vmem_bytes: int
) -> dict[str, tuple[Callable[..., Any], ShapesAndDtypes]]:
    """(program, shapes of its arguments) of "forward" and "backward", bfloat16, causal, no segment ids."""
    import jax.numpy as jnp

    from impl.kernels.interface import KernelConfig
    from impl.kernels.pallas_blocks import Band
    from impl.kernels.pallas_halo_backward import BackwardResult, BandCotangents, band_backward
    from impl.kernels.pallas_halo_forward import BandOperands, band_forward

    heads, dim, window = layer.num_kv_heads, layer.head_dim, layer.window
    group, outer = layer.num_query_heads // heads, -(-(window - 1) // block)
    inner, final = ROWS // block - outer, (ROWS - window + 1) // block
    band = Band(window - 1, block, tile, outer, inner, heads, heads, group, final)
    config = KernelConfig((window - 1, 0), dim**-0.5, vmem_bytes=vmem_bytes)
    narrow, wide = jnp.bfloat16, jnp.float32
    queries, keys = ((heads, group, ROWS, dim), narrow), ((heads, ROWS, dim), narrow)
    rows, tail = (queries[0][:3], wide), ((heads, band.tail_blocks * block, dim), wide)
    inputs: ShapesAndDtypes = [((1,), jnp.int32), queries, keys, keys]

    def forward(lowest: Any, query: Any, key: Any, value: Any) -> Any:
        return band_forward(BandOperands(query, key, value, None, None, lowest), band, config)

    def backward(lowest: Any, query: Any, key: Any, value: Any, *rest: Any) -> Any:
        dout, lse, dlse, out, dquery, tail_key, tail_value = rest
        operands = BandOperands(query, key, value, None, None, lowest)
        into = BackwardResult(dquery, None, None, tail_key, tail_value, None, None)
        return band_backward(operands, BandCotangents(dout, lse, dlse, out), band, config, jnp.dtype(narrow), into)

    return {
        "forward": (forward, inputs),
        "backward": (backward, [*inputs, queries, rows, rows, queries, queries, tail, tail]),
    }
