"""Local attention by JAX's Pallas splash attention: compiled on TPU, interpreted elsewhere. Signature: interface.py.

Only its kernels are JAX's: which blocks they visit is said by splash_blocks.py. `unsupported` says what it declines.
Tested in tests/impl/test_kernels.py.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel
from jaxtyping import Array, Float, Int32

from impl.kernels.interface import KernelConfig, KernelOperands, LocalGradients, RowCotangents
from impl.kernels.pallas_cost import with_cost
from impl.kernels.splash_blocks import Window, band_of, whole
from impl.kernels.xla import sink_gradient

LANES = 128
BLOCK = 512
"""Rows of a block of queries and of keys: of 256, 512, 1024 the fastest by libtpu's static schedule (head_dim 256)."""
LONG_BLOCK = 1024
LONG_CALL = 2**17 * BLOCK**2
"""From this many pairs of rows on the tables of visited blocks, 3 bytes a pair of blocks, would crowd a TPU's 1 MiB of
scalar memory: larger blocks, fewer entries. They last to 2M tokens on 8 ranks, gathered."""

NO_ROW_LSE = 1e30
"""Stands for the lse of rows without keys in the backward: makes every probability of the row exactly zero."""


def unsupported(dtype: jnp.dtype, contiguous_keys: bool) -> str | None:
    """Why splash attention cannot run a layer, or None. All sizes are taken: rows are padded to whole blocks."""
    if dtype == jnp.float64:
        return "splash attention accumulates in float32, got float64 inputs"
    if dtype == jnp.float16:
        return "splash attention runs bfloat16 and float32 on TPU, got float16 inputs"
    if not contiguous_keys:
        return "splash attention needs keys in position order; in the striped layout a ring's keys are not"
    return None


def launch(operands: KernelOperands, config: KernelConfig) -> tuple[Array, Array]:
    """The kernel's own out and lse: [batch, heads, padded rows, …], rows without keys not yet told apart."""
    call = _Call.of(operands, config)
    band = band_of(operands, config, call.query_block, call.key_block)

    def one_row(query: Array, key: Array, value: Array, ids: Any) -> tuple[Array, Array]:
        out, (lse,) = splash_kernel._splash_attention_forward(
            band.by_query,
            query,
            key,
            value,
            ids,
            operands.sinks,
            save_residuals=True,
            block_sizes=splash_kernel.BlockSizes(block_q=call.query_block, block_kv=call.key_block),
            residual_checkpoint_name=None,
            mask_function=call.window,
            **call.static,
        )
        return out, lse

    with call.numerics():
        out, lse = with_cost(jax.vmap(one_row), call.cost(operands, config, matmuls=2))(
            *call.padded(operands, config), call.segment_ids(operands, config)
        )
    return out, lse


def finish(
    launched: tuple[Array, Array], operands: KernelOperands, config: KernelConfig
) -> tuple[
    Float[Array, "batch query_rows num_query_heads value_dim"], Float[Array, "batch query_rows num_query_heads"]
]:
    """out and lse in float32. out has been rounded to the inputs' dtype by the kernel, and so has the scaled query."""
    call = _Call.of(operands, config)
    out, lse = (jnp.swapaxes(rows, 1, 2)[:, : call.query_rows] for rows in launched)
    # Splash masks with a large finite number: a row without keys averages all values and has an lse near that number.
    empty = lse < call.static["mask_value"] / 2
    out = jnp.where(empty[..., None], 0, out.astype(jnp.float32))
    return out, jnp.where(empty, -jnp.inf, lse)


def launch_backward(
    operands: KernelOperands, cotangents: RowCotangents, config: KernelConfig
) -> tuple[Array, Array, Array]:
    """The kernels' own dquery, dkey, dvalue: [batch, heads, padded rows, dim], rounded to the inputs' dtype."""
    call = _Call.of(operands, config)
    band = band_of(operands, config, call.query_block, call.key_block)

    def one_row(query: Array, key: Array, value: Array, ids: Any, *rows: Array) -> tuple[Array, Array, Array]:
        shared = {"mask_function": call.window, **call.static, **_HEAD_DIM_MINOR}
        inputs = (query, key, value, ids, None, *rows)
        _, dkey, dvalue = splash_kernel._splash_attention_bwd_dkv(
            *inputs,
            bq=call.query_block,
            bkv=call.key_block,
            bkv_compute=call.key_block,
            mask_info=band.by_key,
            use_fused_bwd_kernel=False,
            **shared,
        )
        dquery = splash_kernel._splash_attention_bwd_dq(
            *inputs, bq=call.query_block, bkv=call.key_block, mask_info=band.by_query, **shared
        )
        return dquery, dkey, dvalue

    rows = (
        _head_major(_finite_lse(cotangents), call.padded_queries, fill=NO_ROW_LSE),
        _head_major(cotangents.dout, call.padded_queries),
        _head_major(cotangents.delta, call.padded_queries),
    )
    with call.numerics():
        return with_cost(jax.vmap(one_row), call.cost(operands, config, matmuls=4))(
            *call.padded(operands, config), call.segment_ids(operands, config), *rows
        )


def finish_backward(
    launched: tuple[Array, Array, Array], operands: KernelOperands, cotangents: RowCotangents, config: KernelConfig
) -> LocalGradients:
    """Gradients in float32 of what the kernels have rounded, p and dlogits before the results."""
    call = _Call.of(operands, config)
    dquery, dkey, dvalue = (jnp.swapaxes(gradient, 1, 2).astype(jnp.float32) for gradient in launched)
    return LocalGradients(
        dquery=dquery[:, : call.query_rows] * config.scale,
        dkey=dkey[:, : call.key_rows],
        dvalue=dvalue[:, : call.key_rows],
        dsinks=sink_gradient(operands.sinks, _finite_lse(cotangents), cotangents.delta),
    )


def _finite_lse(cotangents: RowCotangents) -> Float[Array, "batch query_rows num_query_heads"]:
    return jnp.where(jnp.isneginf(cotangents.lse), NO_ROW_LSE, cotangents.lse)


_HEAD_DIM_MINOR = dict.fromkeys(("q_layout", "k_layout", "v_layout"), splash_kernel.QKVLayout.HEAD_DIM_MINOR)


@dataclass(frozen=True)
class _Call:
    """The static shape of a call: rows, and rows padded to whole blocks."""

    query_rows: int
    key_rows: int
    query_block: int
    key_block: int
    dtype: Any
    window: Window
    static: dict[str, Any]

    @classmethod
    def of(cls, operands: KernelOperands, config: KernelConfig) -> "_Call":
        query_rows, key_rows = operands.query.shape[1], operands.key.shape[1]
        static = {
            "mask_value": splash_kernel.DEFAULT_MASK_VALUE,
            "is_mqa": False,
            "attn_logits_soft_cap": config.attn_logits_soft_cap,
            "interpret": config.interpret,
        }
        longest = LONG_BLOCK if query_rows * key_rows > LONG_CALL else BLOCK
        query_block, key_block = (min(whole(rows, LANES), longest) for rows in (query_rows, key_rows))
        window = Window(*config.window)
        return cls(query_rows, key_rows, query_block, key_block, operands.query.dtype, window, static)

    @property
    def padded_queries(self) -> int:
        return whole(self.query_rows, self.query_block)

    @property
    def padded_keys(self) -> int:
        return whole(self.key_rows, self.key_block)

    def cost(self, operands: KernelOperands, config: KernelConfig, matmuls: int) -> pl.CostEstimate:
        """What one kernel does: `matmuls` products of every query with the keys of its band; of a backward, dkv's."""
        left, right = (self.key_rows if reach is None else reach for reach in config.window)
        pairs = (
            operands.query.shape[0] * operands.query.shape[2] * self.query_rows * min(left + 1 + right, self.key_rows)
        )
        arrays = (operands.query, operands.key, operands.value)
        return pl.CostEstimate(
            flops=2 * matmuls * pairs * operands.query.shape[3],
            transcendentals=pairs,
            bytes_accessed=sum(array.size * array.dtype.itemsize for array in arrays),
        )

    @contextlib.contextmanager
    def numerics(self) -> Iterator[None]:
        """float32 inputs are multiplied as float32, where a TPU's default would round them to bfloat16; and block
        indices are int32 even where a program enables 64 bits, since splash mixes them with constants."""
        with jax.enable_x64(False), jax.default_matmul_precision("highest" if self.dtype == jnp.float32 else None):
            yield

    def padded(self, operands: KernelOperands, config: KernelConfig) -> tuple[Array, Array, Array]:
        """[batch, heads, padded rows, dim]; splash knows no scale, so the query carries it."""
        scaled = (operands.query.astype(jnp.float32) * config.scale).astype(operands.query.dtype)
        return (
            _head_major(scaled, self.padded_queries),
            _head_major(operands.key, self.padded_keys),
            _head_major(operands.value, self.padded_keys),
        )

    def segment_ids(self, operands: KernelOperands, config: KernelConfig) -> Any:
        """Ids that also hide what the window cannot: rows outside the sequence, padding tokens, padding to blocks.

        None where nothing is to be hidden: the kernel is then a shorter one.
        """
        queries, keys = operands.query_segment_ids, operands.key_segment_ids
        if queries is None or keys is None:
            if not self._hides_keys(config):
                return None
            queries = jnp.zeros((operands.query.shape[0], self.query_rows), jnp.int32)
            keys = jnp.zeros((operands.key.shape[0], self.key_rows), jnp.int32)
            unused = jnp.int32(1)
        else:
            unused = _unused_id(queries)
        hidden = jnp.broadcast_to(operands.key_positions < 0, keys.shape)
        if config.padding_segment_id is not None:
            hidden |= keys == config.padding_segment_id
        to_blocks = ((0, 0), (0, self.padded_keys - self.key_rows))
        keys = jnp.where(jnp.pad(hidden, to_blocks, constant_values=True), unused, jnp.pad(keys, to_blocks))
        queries = jnp.pad(queries, ((0, 0), (0, self.padded_queries - self.query_rows)))
        return splash_kernel.SegmentIds(queries, keys)

    def _hides_keys(self, config: KernelConfig) -> bool:
        """Whether, without documents, the window may reach keys that are outside the sequence or only fill a block."""
        if config.key_offset is None:
            return self.padded_keys > self.key_rows
        right = self.key_rows if config.window[1] is None else config.window[1]
        sees_filling = self.padded_keys > self.key_rows and self.query_rows - config.key_offset + right > self.key_rows
        return config.key_offset < 0 or self.key_rows + config.key_offset > self.query_rows or sees_filling


def _unused_id(ids: Int32[Array, "batch rows"]) -> Int32[Array, ""]:
    """An id that occurs nowhere in `ids`, found bit by bit: always on the side where fewer of the ids are.

    Each bit halves how many ids agree with it so far, so none does long before the last of 32.
    """
    bits = lax.bitcast_convert_type(ids, jnp.uint32)

    def narrow(index: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        unused, agree = state
        is_set = (bits >> (31 - index).astype(jnp.uint32)) & 1 == 1
        choose_set = jnp.sum(agree & is_set) < jnp.sum(agree & ~is_set)
        return 2 * unused + choose_set.astype(jnp.uint32), agree & (is_set == choose_set)

    unused, _ = lax.fori_loop(0, 32, narrow, (jnp.uint32(0), jnp.ones(bits.shape, jnp.bool_)))
    return lax.bitcast_convert_type(unused, jnp.int32)


def _head_major(rows: Array, padded_rows: int, fill: float = 0) -> Array:
    """[batch, rows, heads, …] → [batch, heads, padded rows, …]."""
    padding = [(0, 0)] * rows.ndim
    padding[2] = (0, padded_rows - rows.shape[1])
    return jnp.pad(jnp.swapaxes(rows, 1, 2), padding, constant_values=fill)
