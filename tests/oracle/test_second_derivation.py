"""The oracle's gradients, derived a second time and on purpose in another way: one explicit Jacobian matrix a row.

The oracle uses delta = dout.out and never forms d p / d logits. Here a sink is one more column with value zero, hidden
keys are left out of the row rather than masked, and every chain of derivatives is a product of matrices.
"""

import numpy as np
import pytest

import oracle


def row_by_row(case):
    """dquery, dkey, dvalue and dsinks from the Jacobian of each row."""
    query, key, value = case["query"], case["key"], case["value"]
    batch, seq, query_heads, head_dim = query.shape
    group = query_heads // key.shape[2]
    cap, sinks, (left, right) = case.get("attn_logits_soft_cap"), case.get("sinks"), case["window"]
    ids = case.get("segment_ids", np.zeros((batch, seq), int))
    scale = case.get("scale", head_dim**-0.5)
    found = {name: np.zeros_like(case[name]) for name in ("query", "key", "value")}
    found["sinks"] = np.zeros(query_heads)
    for b, q, h in np.ndindex(batch, seq, query_heads):
        first, last = max(0, q - left), min(seq - 1, q + right)
        seen = [k for k in range(first, last + 1) if ids[b, k] == ids[b, q] != case.get("padding_segment_id")]
        keys, values = key[b, seen, h // group], value[b, seen, h // group]
        plain = scale * keys @ query[b, q, h]
        logits = plain if cap is None else cap * np.tanh(plain / cap)
        bend = np.diag(np.ones(len(seen)) if cap is None else 1 / np.cosh(plain / cap) ** 2)
        if sinks is not None:  # a column of its own
            logits, values = np.append(logits, sinks[h]), np.vstack([values, np.zeros(value.shape[3])])
        if len(logits) == 0:
            continue
        weights = np.exp(logits - logits.max())
        p = weights / weights.sum()
        jacobian = np.diag(p) - np.outer(p, p)  # d p / d logits
        dlogits = jacobian.T @ values @ case["dout"][b, q, h] + p * case["dlse"][b, q, h]
        found["value"][b, seen, h // group] += np.outer(p, case["dout"][b, q, h])[: len(seen)]
        if sinks is not None:
            found["sinks"][h] += dlogits[-1]
        dplain = scale * bend @ dlogits[: len(seen)]
        found["query"][b, q, h] = keys.T @ dplain
        found["key"][b, seen, h // group] += np.outer(dplain, query[b, q, h])
    return found


@pytest.mark.parametrize("seed", range(12))
def test_gradients_agree_with_explicit_jacobians(draw, seed):
    random = np.random.default_rng(seed)
    query_heads, kv_heads = [(1, 1), (4, 2), (3, 1), (2, 2)][seed % 4]
    options = {"window": (int(random.integers(0, 12)), int(random.integers(0, 4)))}
    if seed % 2:
        options["sinks"] = random.normal(size=query_heads)
    if seed % 3 == 0:
        options["attn_logits_soft_cap"] = 0.9
    if seed % 3 != 1:
        options["segment_ids"] = random.integers(-1, 3, size=(2, 17))
    if seed % 5 == 0:
        options.update(segment_ids=random.integers(-1, 3, size=(2, 17)), padding_segment_id=0)
    case = draw(seed=100 + seed, batch=2, seq=17, heads=(query_heads, kv_heads), dims=(4, 3), **options)
    found, gradients = row_by_row(case), oracle.attention_vjp(**case)
    for tensor in ("query", "key", "value"):
        np.testing.assert_allclose(
            getattr(gradients, f"d{tensor}"), found[tensor], rtol=1e-11, atol=1e-13, err_msg=tensor
        )
    if "sinks" in options:
        np.testing.assert_allclose(gradients.dsinks, found["sinks"], rtol=1e-11, atol=1e-13)
