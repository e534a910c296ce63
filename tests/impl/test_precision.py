"""In float32 and bfloat16 every element stays within the oracle's allowance, and results have the promised dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from impl import AttentionType


@pytest.mark.parametrize("strategy", ["halo", "all_gather"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_every_element_stays_within_its_allowance(make_case, run_case, strategy, dtype, cap) -> None:
    case = make_case(
        strategy=strategy,
        layout="dual_chunk_swap",
        dtype=dtype,
        seq_len=64,
        window=(19, 0),
        documents=(40, 24),
        sinks=True,
        head_dim=32,
        attn_logits_soft_cap=cap,
    )
    data = case.data_of()
    allowances = oracle.budget.allowances(
        data["query"],
        data["key"],
        data["value"],
        dout=data["dout"],
        dlse=data["dlse"],
        window=case.window,
        segment_ids=data["segment_ids"],
        attn_logits_soft_cap=cap,
        sinks=data["sinks"],
        precision=oracle.budget.Precision(dtype=dtype),
        structured_values=False,
    )
    for name, (computed, expected) in run_case(case).items():
        error = np.abs(computed - expected)
        share = (error / getattr(allowances, name)).max()
        assert np.all(error <= getattr(allowances, name)), f"{name} takes {share:.2f} of its allowance"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_results_and_gradients_have_the_promised_dtypes(make_case, dtype) -> None:
    case = make_case(dtype=dtype, sinks=True, context=2, seq_len=16)
    (out, lse), gradients = jax.eval_shape(case.attention_and_gradients, *case.arguments())
    wide = "float64" if dtype == "float64" else "float32"
    assert (out.dtype, lse.dtype) == (jnp.dtype(dtype), jnp.dtype(wide)), "out as query, lse in the accumulation dtype"
    assert [gradient.dtype.name for gradient in gradients] == [dtype] * 3 + [wide], "each gradient as its input"


def test_cancelling_halo_gradients_are_summed_before_they_are_rounded(make_case) -> None:
    """Two ranks owe a key gradients of +256 and −256 + 1/4: their sum survives only if it is formed unrounded."""
    case = make_case(
        context=2,
        seq_len=4,
        batch=1,
        window=(2, 0),
        num_query_heads=1,
        num_kv_heads=1,
        value_dim=8,
        dtype="bfloat16",
        attention_type=AttentionType.LOCAL_SLIDING,
    )
    zeros = np.zeros((1, 4, 1, 8), jnp.bfloat16)
    dout = zeros.copy()
    # Query = key = 0: every probability is 1 / (visible keys). Key 1 gets dout[1] / 2 at home, dout[2] / 3 by the halo.
    dout[0, 1], dout[0, 2] = 512, -768
    dout[0, 3] = 0.75
    names = ("query", "key", "value")
    arguments = [case.place(name, zeros) for name in names]
    _, (_, _, dvalue) = jax.jit(case.attention_and_gradients)(
        *arguments, None, None, case.place("dout", dout), case.place("dlse", np.zeros((1, 4, 1), np.float32))
    )
    assert case.collect("value", dvalue)[0, 1].tolist() == [[0.25] * 8], "256 − 256 + 0.25, rounded once"
