"""What the oracle's tests share: drawn cases, and answers by other means that know nothing of the oracle's code.

`fifty_digits` sums scalars in 50-digit arithmetic and differentiates by finite differences; `complex_step`
differentiates a naive complex formula. Both write their own mask.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mpmath
import numpy as np
import pytest

BENCH = Path(__file__).parents[2] / "bench"
TENSORS = ("query", "key", "value", "sinks")


@pytest.fixture
def legal_algorithms() -> ModuleType:
    """The NumPy zoo of bench/legal_algorithms.py (bench is no package)."""
    name = "legal_algorithms"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
        assert spec is not None, f"bench/{name}.py is there"
        assert spec.loader is not None, f"bench/{name}.py can be loaded"
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture
def draw() -> Callable[..., dict[str, Any]]:
    """Draws the arguments of `oracle.attention_vjp` (window (3, 0), standard normal) with the given changes."""
    return _draw


def _draw(
    seed: int = 0,
    batch: int = 1,
    seq: int = 6,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (2, 3),
    **changes: Any,
) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    (query_heads, kv_heads), (head_dim, value_dim) = heads, dims
    return {
        "query": random.normal(size=(batch, seq, query_heads, head_dim)),
        "key": random.normal(size=(batch, seq, kv_heads, head_dim)),
        "value": random.normal(size=(batch, seq, kv_heads, value_dim)),
        "dout": random.normal(size=(batch, seq, query_heads, value_dim)),
        "dlse": random.normal(size=(batch, seq, query_heads)),
        "window": (3, 0),
        **changes,
    }


@pytest.fixture
def fifty_digits() -> Callable[[dict[str, Any]], dict[str, np.ndarray]]:
    """out, lse, dquery, dkey, dvalue and dsinks of a drawn case, to 50 digits and then rounded to float64."""
    return _fifty_digits


def _fifty_digits(case: dict[str, Any]) -> dict[str, np.ndarray]:
    with mpmath.workdps(50):
        exact = {name: np.vectorize(mpmath.mpf, otypes=[object])(case[name]) for name in TENSORS if name in case}
        out, lse = _scalar_attention(case, exact)
        answers = {"out": out, "lse": lse}
        for name, array in exact.items():
            answers[f"d{name}"] = np.empty(array.shape, object)
            for index in np.ndindex(array.shape):
                answers[f"d{name}"][index] = _central_difference(case, exact, name, index)
        return {name: array.astype(np.float64) for name, array in answers.items()}


def _central_difference(case: dict[str, Any], exact: dict[str, np.ndarray], name: str, index: tuple[int, ...]) -> Any:
    step = mpmath.mpf("1e-16")  # error of the order of step^2 = 1e-32
    losses = []
    for sign in (1, -1):
        moved = {**exact, name: exact[name].copy()}
        moved[name][index] += sign * step
        out, lse = _scalar_attention(case, moved)
        loss = sum((case["dout"] * out).ravel())
        losses.append(
            loss + sum(c * x for c, x in zip(case["dlse"].ravel(), lse.ravel(), strict=True) if mpmath.isfinite(x))
        )
    return (losses[0] - losses[1]) / (2 * step)


def _scalar_attention(case: dict[str, Any], tensors: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Attention by the definition: sums of exponentials of scalars, no maximum taken out."""
    query, key, value, sinks = tensors["query"], tensors["key"], tensors["value"], tensors.get("sinks")
    batch, seq, query_heads, head_dim = query.shape
    cap, scale = case.get("attn_logits_soft_cap"), case.get("scale")
    scale = 1 / mpmath.sqrt(head_dim) if scale is None else mpmath.mpf(scale)
    out = np.full((batch, seq, query_heads, value.shape[3]), mpmath.mpf(0), object)
    lse = np.full((batch, seq, query_heads), mpmath.mpf("-inf"), object)
    for b, q, h in np.ndindex(batch, seq, query_heads):
        kv = h * key.shape[2] // query_heads
        weights = {}
        for k in _seen_by(case, b, q, seq):
            logit = scale * sum(query[b, q, h, d] * key[b, k, kv, d] for d in range(head_dim))
            weights[k] = mpmath.exp(logit if cap is None else cap * mpmath.tanh(logit / cap))
        total = sum(weights.values()) + (0 if sinks is None else mpmath.exp(sinks[h]))
        if total:
            lse[b, q, h] = mpmath.log(total)
            for d in range(value.shape[3]):
                out[b, q, h, d] = sum((w * value[b, k, kv, d] for k, w in weights.items()), mpmath.mpf(0)) / total
    return out, lse


def _seen_by(case: dict[str, Any], b: int, q: int, seq: int) -> Iterator[int]:
    """Keys that query q sees, by the words of docs/semantics.md."""
    left, right = case["window"]
    segments, padding = case.get("segment_ids"), case.get("padding_segment_id")
    for k in range(seq):
        if (left is not None and k < q - left) or (right is not None and k > q + right):
            continue
        if segments is not None and (segments[b][k] != segments[b][q] or segments[b][q] == padding):
            continue
        yield k


@pytest.fixture
def complex_step() -> Callable[[dict[str, Any], dict[str, np.ndarray]], float]:
    """The derivative of `sum(dout * out) + sum(dlse * lse)` along a direction (a dict of query, key, value, sinks)."""
    return _complex_step


def _complex_step(case: dict[str, Any], direction: dict[str, np.ndarray]) -> float:
    """Im f(x + i h d) / h: no subtraction, so exact to rounding for tiny h."""
    step = 1e-100
    moved = {name: case[name] + 1j * step * direction[name] for name in direction}
    query, key, value = moved["query"], moved["key"], moved["value"]
    batch, seq, query_heads, head_dim = query.shape
    scale, cap = case.get("scale"), case.get("attn_logits_soft_cap")
    loss = 0.0 + 0.0j
    for b, h in np.ndindex(batch, query_heads):
        kv = h * key.shape[2] // query_heads
        logits = query[b, :, h] @ key[b, :, kv].T * (head_dim**-0.5 if scale is None else scale)
        logits = logits if cap is None else cap * np.tanh(logits / cap)
        sees = np.zeros((seq, seq))
        for q in range(seq):
            sees[q, list(_seen_by(case, b, q, seq))] = 1.0
        weights = np.exp(logits) * sees
        total = weights.sum(axis=1) + (np.exp(moved["sinks"][h]) if "sinks" in moved else 0.0)
        is_read = total != 0
        out = weights[is_read] @ value[b, :, kv] / total[is_read, None]
        loss += (case["dout"][b, is_read, h] * out).sum() + (case["dlse"][b, is_read, h] * np.log(total[is_read])).sum()
    return float(loss.imag) / step
