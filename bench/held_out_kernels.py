"""How much of its allowance each real kernel needs, of those that had no part in choosing the budget's constants.

    python bench/held_out_kernels.py [--seeds N] [--kinds plain,peaked,...] [--dtypes float32,bfloat16]

jax.nn.dot_product_attention and JAX splash attention (interpreted, fused and unfused backward) on one CPU device, for
each dtype and kind of values, at seeds that the calibration never saw. A share above 1 would be a false alarm.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from oracle_cases import KINDS, TENSORS, Shape, draw, is_structured

import oracle
from oracle.budget import Precision, answer_with_allowances, share

FIRST_SEED = 1000  # calibration uses 0, 1, 2, ...
SHAPES = (
    Shape(seq=256, window=(99, 0)),
    Shape(seq=256, head_dim=128, value_dim=128, window=(31, 0)),
    Shape(seq=384, window=(None, 0), attn_logits_soft_cap=5.0),
    Shape(seq=256, window=(60, 20), query_heads=2, kv_heads=2),
)
Kernel = Callable[[dict[str, Any]], dict[str, np.ndarray] | None]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="seeds for each shape and kind of values")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of values, comma-separated")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="dtypes, comma-separated")
    arguments = parser.parse_args()
    dtypes: list[str] = arguments.dtypes.split(",")
    kinds: list[str] = arguments.kinds.split(",")
    print(f"{'kernel':15} {'dtype':9} {'values':11} " + " ".join(f"{tensor:>7}" for tensor in TENSORS))
    for (name, kernel), dtype, kind in itertools.product(KERNELS.items(), dtypes, kinds):
        largest: dict[str, float] = {}
        for shape, seed in itertools.product(SHAPES, range(FIRST_SEED, FIRST_SEED + arguments.seeds)):
            for tensor, size in measured(name, kernel, kind, seed, dtype, shape).items():
                largest[tensor] = max(size, largest.get(tensor, 0.0))
        cells = (f"{largest[tensor]:7.3f}" if tensor in largest else "      -" for tensor in TENSORS)
        print(f"{name:15} {dtype:9} {kind:11} " + " ".join(cells), flush=True)


def measured(name: str, kernel: Kernel, kind: str, seed: int, dtype: str, shape: Shape) -> dict[str, float]:
    """The largest share by tensor; empty where the kernel does not have what the shape asks for."""
    case = draw(kind, seed, dtype, shape)
    if name == "jax.nn":
        case = {**case, "sinks": None, "value": case["value"][..., : shape.head_dim]}
    case["dlse"] = np.zeros_like(case["dlse"])  # neither kernel has a gradient of lse
    found = kernel(case)
    if found is None:
        return {}
    precision = Precision(dtype, prescaled_query="splash" in name)
    answer, allowed = answer_with_allowances(**case, precision=precision, structured_values=is_structured(kind))
    return {
        tensor: float(share(array, getattr(answer, tensor), getattr(allowed, tensor)).max())
        for tensor, array in found.items()
    }


def jax_nn(case: dict[str, Any]) -> dict[str, np.ndarray] | None:
    """jax.nn.dot_product_attention with a mask."""
    if case["attn_logits_soft_cap"] is not None or case["query"].shape[3] != case["value"].shape[3]:
        return None
    mask = jnp.asarray(oracle.mask.visible(case["query"].shape[1], window=case["window"]))[:, None]

    def forward(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(query, key, value, mask=mask)

    tensors = (case["query"], case["key"], case["value"])
    with jax.default_matmul_precision("highest"):
        out, gradients = jax.jit(lambda tensors, dout: _with_vjp(forward, tensors, dout))(tensors, case["dout"])
    return {"out": np.asarray(out), **_named(gradients)}


def splash_attention(fused: bool) -> Kernel:
    """JAX splash attention; the caller multiplies the query by the scale, in the query's dtype."""

    def kernel(case: dict[str, Any]) -> dict[str, np.ndarray]:
        seq, heads = case["query"].shape[1:3]
        local = splash_mask.LocalMask((seq, seq), case["window"], 0)
        block = 128
        blocks = splash.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
            block_kv_dkv_compute=block, block_q_dq=None if fused else block, block_kv_dq=None if fused else block,
            use_fused_bwd_kernel=fused,
        )  # fmt: skip
        made = {
            residuals: splash.make_splash_mha_single_device(
                splash_mask.MultiHeadMask([local] * heads),
                block_sizes=blocks,
                attn_logits_soft_cap=case["attn_logits_soft_cap"],
                save_residuals=residuals,
                interpret=True,
            )
            for residuals in (False, True)
        }
        scale = case["query"].shape[3] ** -0.5

        def forward(query: Any, key: Any, value: Any, sinks: Any, residuals: bool = False) -> Any:
            query, key, value = ((x[0].swapaxes(0, 1)) for x in (query, key, value))
            answer: Any = made[residuals]((query * scale).astype(query.dtype), key, value, None, sinks)
            return answer if residuals else answer.swapaxes(0, 1)[None]

        tensors = tuple(case[name] for name in ("query", "key", "value", "sinks"))
        with jax.default_matmul_precision("highest"):
            out, gradients = jax.jit(lambda tensors, dout: _with_vjp(forward, tensors, dout))(tensors, case["dout"])
            _, (lse,) = jax.jit(lambda tensors: forward(*tensors, residuals=True))(tensors)
        return {"out": np.asarray(out), "lse": np.asarray(lse).T[None], **_named(gradients)}

    return kernel


def _with_vjp(forward: Callable[..., Any], tensors: tuple[Any, ...], dout: Any) -> tuple[Any, Any]:
    out, vjp = jax.vjp(forward, *tensors)
    return out, vjp(dout)


def _named(gradients: tuple[Any, ...]) -> dict[str, np.ndarray]:
    return dict(zip(("dquery", "dkey", "dvalue", "dsinks"), map(np.asarray, gradients), strict=False))


KERNELS: dict[str, Kernel] = {
    "jax.nn": jax_nn,
    "splash": splash_attention(fused=False),
    "splash fused": splash_attention(fused=True),
}

if __name__ == "__main__":
    main()
