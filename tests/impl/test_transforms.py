"""The layer inside of other transformations: vmap, scan, checkpoint, single gradients, unused results, second calls."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import impl

STRATEGIES = ("halo", "all_gather")


def inputs(case, seed: int = 0):
    return case.arguments(seed)[:3]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_vmap_is_a_stack_of_calls(make_case, strategy) -> None:
    case = make_case(strategy=strategy, context=2, seq_len=16)

    def loss(query, key, value):
        out, lse = case.attention(query, key, value, None, None)
        return (out**2).sum() + lse.sum()

    draws = [inputs(case, seed) for seed in (0, 1)]
    stacked = [jnp.stack(arrays) for arrays in zip(*draws, strict=True)]
    batched = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2))))(*stacked)
    single = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    for index, draw in enumerate(draws):
        for one, two in zip(batched, single(*draw), strict=True):
            np.testing.assert_allclose(one[index], two, rtol=0, atol=1e-12, err_msg="vmap must change nothing")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scan_over_layers_is_a_loop(make_case, strategy) -> None:
    case = make_case(strategy=strategy, context=2, seq_len=16, value_dim=8, num_kv_heads=4)

    def layer(hidden, _):
        out, _lse = case.attention(hidden, hidden, hidden, None, None)
        return hidden + out, None

    def looped(hidden):
        for _ in range(3):
            hidden, _ = layer(hidden, None)
        return (hidden**2).sum()

    def scanned(hidden):
        return (jax.lax.scan(layer, hidden, None, length=3)[0] ** 2).sum()

    query = inputs(case)[0]
    one, two = jax.jit(jax.grad(scanned))(query), jax.jit(jax.grad(looped))(query)
    scale = np.abs(two).max()
    np.testing.assert_allclose(one / scale, two / scale, rtol=0, atol=1e-12, err_msg="scan must change nothing")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("policy", "kernels", "permutes"),
    [("everything", 1, 4), ("named", 1, 4), ("out_and_lse", 1, 6), ("nothing", 2, 6)],
)
def test_saved_residuals_spare_the_forward_kernel(
    make_case, traced_equations, strategy, policy, kernels, permutes
) -> None:
    case = make_case(strategy=strategy, context=2, seq_len=16, dtype="float32")
    policies = {
        "everything": jax.checkpoint_policies.everything_saveable,
        "named": jax.checkpoint_policies.save_only_these_names(*impl.RESIDUAL_NAMES),
        "out_and_lse": jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse"),
        "nothing": jax.checkpoint_policies.nothing_saveable,
    }

    def loss(query, key, value):
        out, lse = case.attention(query, key, value, None, None)
        return (out**2).sum() + lse.sum()

    remat = jax.grad(jax.checkpoint(loss, policy=policies[policy]), argnums=(0, 1, 2))
    runs = Counter(equation.primitive.name for equation in traced_equations(remat, *inputs(case)))
    # One logarithm a forward kernel, for its lse; the backward takes none.
    assert runs["log"] == kernels, f"runs of the forward kernel under {policy}"
    if strategy == "halo":
        assert runs["ppermute"] == permutes, f"keys, values and their gradients under {policy}"


def test_rematerialisation_changes_no_gradient(make_case) -> None:
    case = make_case(context=2, seq_len=16)
    policy = jax.checkpoint_policies.save_only_these_names(*impl.RESIDUAL_NAMES)

    def loss(query, key, value):
        out, lse = case.attention(query, key, value, None, None)
        return (out**2).sum() + lse.sum()

    @jax.jit
    def both(*arguments):
        return [
            jax.grad(function, argnums=(0, 1, 2))(*arguments)
            for function in (loss, jax.checkpoint(loss), jax.checkpoint(loss, policy=policy))
        ]

    plain, *others = both(*inputs(case))
    for gradients in others:
        for one, two in zip(gradients, plain, strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=1e-12, err_msg="recomputing must change nothing")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_gradient_alone_and_an_unused_result(make_case, strategy) -> None:
    case = make_case(strategy=strategy, context=2, seq_len=16, sinks=True)
    query, key, value, sinks, _, dout, dlse = case.arguments()

    def both(query, key, value, sinks):
        out, lse = case.attention(query, key, value, sinks, None)
        return (out * dout).sum() + (lse * dlse).sum()

    def out_only(query, key, value, sinks):
        return (case.attention(query, key, value, sinks, None)[0] * dout).sum()

    def lse_only(query, key, value, sinks):
        return (case.attention(query, key, value, sinks, None)[1] * dlse).sum()

    @jax.jit
    def every_way(*arguments):
        everything = [jax.grad(loss, argnums=(0, 1, 2, 3))(*arguments) for loss in (both, out_only, lse_only)]
        return *everything, [jax.grad(both, argnums=index)(*arguments) for index in range(4)]

    together, *parts, singly = every_way(query, key, value, sinks)
    for index, (whole, alone) in enumerate(zip(together, singly, strict=True)):
        np.testing.assert_allclose(alone, whole, rtol=0, atol=1e-12, err_msg=f"gradient of argument {index} alone")
        total = parts[0][index] + parts[1][index]
        np.testing.assert_allclose(total, whole, rtol=0, atol=1e-12, err_msg="gradients are linear in the cotangents")
    assert not np.any(parts[1][2]), "lse does not depend on the values"


def test_a_second_call_with_another_window_and_shape_is_another_program(check_exact) -> None:
    for fields in ({"window": (2, 0)}, {"window": (9, 0)}, {"window": (9, 0), "seq_len": 24, "num_query_heads": 2}):
        check_exact(context=2, **fields)


def test_shared_keys_and_values_get_the_sum_of_both_gradients(make_case) -> None:
    case = make_case(context=2, seq_len=16, value_dim=8)
    query, key, _, _, _, dout, dlse = case.arguments()
    _, (_, dkey, dvalue) = jax.jit(case.attention_and_gradients)(query, key, key, None, None, dout[..., :8], dlse)

    def shared(query, rows):
        out, lse = case.attention(query, rows, rows, None, None)
        return (out * dout).sum() + (lse * dlse).sum()

    drows = jax.jit(jax.grad(shared, argnums=1))(query, key)
    np.testing.assert_allclose(drows, dkey + dvalue, rtol=0, atol=1e-12, err_msg="one array passed as both")
