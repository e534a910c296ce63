"""The kinds of values that every measurement of the oracle goes through, and how a NumPy algorithm is held to it.

Used by the scripts of bench/ that calibrate and measure the budget, and by tests/oracle. Imports the oracle, not JAX.
"""

import dataclasses
from typing import Any

import legal_algorithms
import ml_dtypes
import numpy as np

import oracle
from oracle.budget import Allowances, Answer, Precision, share

KINDS = ("plain", "peaked", "uniform", "huge", "tiny", "cancelling", "positive", "constant")
TENSORS = ("out", "lse", "dquery", "dkey", "dvalue", "dsinks")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static half of a case; everything else follows from its kind and seed."""

    seq: int = 96
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    value_dim: int = 48
    window: tuple[int | None, int | None] = (40, 0)
    attn_logits_soft_cap: float | None = None
    batch: int = 1


def draw(kind: str, seed: int, dtype: str, shape: Shape = Shape()) -> dict[str, Any]:
    """Arguments of `oracle.attention_vjp`, stored in dtype: standard normal, then made `kind`."""
    random = np.random.default_rng([seed, KINDS.index(kind)])
    rows = (shape.batch, shape.seq)
    tensors = {
        "query": random.normal(size=(*rows, shape.query_heads, shape.head_dim)),
        "key": random.normal(size=(*rows, shape.kv_heads, shape.head_dim)),
        "value": random.normal(size=(*rows, shape.kv_heads, shape.value_dim)),
        "dout": random.normal(size=(*rows, shape.query_heads, shape.value_dim)),
    }
    dlse = random.normal(size=(*rows, shape.query_heads)).astype(np.float32)
    sinks = random.uniform(-3, 3, size=shape.query_heads).astype(np.float32)
    alternating = np.where(np.arange(shape.seq) % 2, 1.0, -1.0)[:, None, None]
    match kind:
        case "peaked":
            tensors["query"] *= 6
        case "uniform":
            tensors["query"] *= 0
        case "huge":
            tensors = {name: 30 * tensor for name, tensor in tensors.items()}
        case "tiny":
            tensors = {name: 1e-3 * tensor for name, tensor in tensors.items()}
        case "cancelling":
            tensors["value"] = alternating + 1e-3 * tensors["value"]
        case "positive":
            tensors = {name: np.abs(tensor) for name, tensor in tensors.items()}
        case "constant":
            tensors = {name: np.full_like(tensor, 0.7) for name, tensor in tensors.items()}
            dlse = np.full_like(dlse, 0.7)
    stored = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    return {
        **{name: tensor.astype(stored) for name, tensor in tensors.items()},
        "dlse": dlse,
        "sinks": sinks,
        "window": shape.window,
        "attn_logits_soft_cap": shape.attn_logits_soft_cap,
    }


def is_structured(kind: str) -> bool:
    """Whether the roundings of this kind need not be independent: values repeat."""
    return kind in ("cancelling", "constant")


def shares(
    algorithm: legal_algorithms.Algorithm, case: dict[str, Any], answer: Answer, allowed: Allowances
) -> dict[str, float]:
    """The largest share of the allowance that a NumPy algorithm needs, by tensor."""
    per_tensor = dict.fromkeys(TENSORS, 0.0)
    if answer.dsinks is None or allowed.dsinks is None:
        raise ValueError("cases of this file have sinks")
    dsinks = np.zeros_like(case["sinks"])
    for row in range(len(case["query"])):
        problem = legal_algorithms.Problem(
            **{name: case[name][row].swapaxes(0, 1) for name in ("query", "key", "value", "dout", "dlse")},
            visible=oracle.mask.visible(case["query"].shape[1], window=case["window"])[0],
            sinks=case["sinks"],
            attn_logits_soft_cap=case["attn_logits_soft_cap"],
            scale=case["query"].shape[3] ** -0.5,
        )
        computed = legal_algorithms.compute(algorithm, problem)
        dsinks += np.asarray(computed.dsinks)
        for tensor in TENSORS[:-1]:
            found = getattr(computed, tensor).swapaxes(0, 1)
            worst = share(found, getattr(answer, tensor)[row], getattr(allowed, tensor)[row]).max()
            per_tensor[tensor] = max(per_tensor[tensor], float(worst))
    return {**per_tensor, "dsinks": float(share(dsinks, answer.dsinks, allowed.dsinks).max())}


def declared(algorithm: legal_algorithms.Algorithm) -> Precision:
    """The precision that a NumPy algorithm has to declare."""
    return Precision(
        algorithm.dtype,
        rounded_probabilities=algorithm.rounded_probabilities or None,
        prescaled_query=algorithm.prescaled_query,
        rounded_logits=algorithm.rounded_logits,
        rounded_partials=algorithm.rounded_partials,
        matmul_passes=algorithm.matmul_passes,
    )
