"""A hybrid decoder end to end: loss and every parameter's gradient, against the same model in NumPy on the oracle."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import oracle
from impl import AttentionConfig, AttentionType
from impl.hybrid import HybridConfig, LayerParameters, decode

LOCAL, GLOBAL = AttentionType.LOCAL_SLIDING, AttentionType.GLOBAL
BATCH, SEQ_LEN, MODEL, QUERY_HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCKS = 2, 24, 6, 4, 2, 4, 3, 2
WINDOW = 5
PATTERN = (LOCAL, GLOBAL)
SEGMENTS = np.repeat(np.array([[3, 1, 3]], np.int32), [5, 9, 10], axis=1).repeat(BATCH, axis=0)


def make_parameters() -> tuple[LayerParameters, ...]:
    random = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray:
        return random.standard_normal((BLOCKS, *shape)) / np.sqrt(MODEL)

    return tuple(
        LayerParameters(
            weights(MODEL, QUERY_HEADS, HEAD_DIM),
            weights(MODEL, KV_HEADS, HEAD_DIM),
            weights(MODEL, KV_HEADS, VALUE_DIM),
            weights(QUERY_HEADS, VALUE_DIM, MODEL),
            weights(QUERY_HEADS),
        )
        for _ in PATTERN
    )


def reference(parameters, hidden, target) -> tuple[float, tuple[LayerParameters, ...]]:
    """loss = ½ Σ (hidden − target)², by hand: forward, then layer by layer backwards."""
    tape = []
    for block in range(BLOCKS):
        for place, kind in enumerate(PATTERN):
            layer = LayerParameters(*(weights[block] for weights in parameters[place]))
            query, key, value = (np.einsum("bsm,mhd->bshd", hidden, weights) for weights in layer[:3])
            keywords = {
                "window": (WINDOW - 1, 0) if kind is LOCAL else (None, 0),
                "segment_ids": SEGMENTS,
                "sinks": layer.sinks,
            }
            attended = oracle.attention(query, key, value, **keywords).out
            tape.append((block, place, layer, hidden, (query, key, value), keywords, attended))
            hidden = hidden + np.einsum("bshd,hdm->bsm", attended, layer.out)
    loss = 0.5 * np.sum((hidden - target) ** 2)
    gradients = tuple(LayerParameters(*(np.zeros_like(weights) for weights in layer)) for layer in parameters)
    dhidden = hidden - target
    for block, place, layer, before, inputs, keywords, attended in reversed(tape):
        dattended = np.einsum("bsm,hdm->bshd", dhidden, layer.out)
        gradients[place].out[block] = np.einsum("bshd,bsm->hdm", attended, dhidden)
        inner = oracle.attention_vjp(*inputs, dout=dattended, **keywords)
        for name, gradient in zip(("query", "key", "value"), inner[:3], strict=True):
            getattr(gradients[place], name)[block] = np.einsum("bsm,bshd->mhd", before, gradient)
            dhidden = dhidden + np.einsum("bshd,mhd->bsm", gradient, getattr(layer, name))
        gradients[place].sinks[block] = inner.dsinks
    return loss, gradients


def make_step(config: HybridConfig, mesh: Mesh, layout: str, dtype: str):
    """(loss and gradients as a function of the parameters, placed in the layout)."""
    random = np.random.default_rng(1)
    order = oracle.layout.permutation(layout, SEQ_LEN, mesh.shape["context"])
    sequence = ("context", "ulysses") if "ulysses" in mesh.axis_names else "context"

    def place(rows: np.ndarray) -> jax.Array:
        return jax.device_put(rows[:, order], NamedSharding(mesh, PartitionSpec(None, sequence)))

    hidden, target = (random.standard_normal((BATCH, SEQ_LEN, MODEL)) for _ in range(2))
    placed = [place(rows.astype(jnp.dtype(dtype))) for rows in (hidden, target)]
    segment_ids = place(SEGMENTS)

    def loss(parameters):
        final = decode(parameters, placed[0], mesh=mesh, config=config, segment_ids=segment_ids)
        return 0.5 * jnp.sum((final - placed[1]).astype(jnp.promote_types(dtype, jnp.float32)) ** 2)

    return jax.value_and_grad(loss), hidden, target


def make_config(general: str, local: str, layout: str, **fields) -> HybridConfig:
    attention = AttentionConfig(
        context_parallel_strategy=general,
        local_context_parallel_strategy=local,
        context_parallel_load_balance=layout != "contiguous",
        sliding_window_size=WINDOW,
    )
    return HybridConfig(attention, PATTERN, **fields)


def make_mesh(general: str) -> Mesh:
    if general == "usp":
        return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("context", "ulysses"))
    return Mesh(np.array(jax.devices()[:2]), ("context",))


PAIRS = [
    (general, local, layout)
    for general in ("all_gather", "ring", "ulysses", "usp")
    for local in ("", "all_gather", "halo", "ring", "ulysses")
    for layout in ("contiguous", "dual_chunk_swap")
]
QUICK = {("all_gather", "halo", "dual_chunk_swap")}


@pytest.mark.parametrize(
    ("general", "local", "layout"),
    [pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow]) for pair in PAIRS],
)
def test_loss_and_every_gradient_are_the_oracles(general, local, layout) -> None:
    parameters = make_parameters()
    step, hidden, target = make_step(make_config(general, local, layout), make_mesh(general), layout, "float64")
    program = jax.jit(step).lower(parameters).compile(compiler_options={"xla_backend_optimization_level": 0})
    loss, gradients = program(parameters)
    expected_loss, expected = reference(parameters, hidden, target)
    assert abs(loss - expected_loss) <= 1e-12 * expected_loss, "the loss"
    for place, (computed_layer, expected_layer) in enumerate(zip(gradients, expected, strict=True)):
        for name, one, two in zip(LayerParameters._fields, computed_layer, expected_layer, strict=True):
            assert np.abs(one - two).max() <= 1e-12 * np.abs(two).max(), f"gradient of {name} at place {place}"


@pytest.mark.parametrize(
    ("remat", "forward_kernels", "permutes"), [("none", 1, 4 + 1), ("attention", 1, 4 + 1), ("full", 2, 6 + 2)]
)
def test_rematerialisation_that_saves_attention_runs_no_kernel_twice(
    remat, forward_kernels, permutes, traced_equations
) -> None:
    config = make_config("all_gather", "halo", "contiguous", remat=remat)
    step, _, _ = make_step(config, make_mesh("all_gather"), "contiguous", "float32")
    parameters = jax.tree.map(lambda weights: weights.astype(np.float32), make_parameters())
    runs = Counter(equation.primitive.name for equation in traced_equations(step, parameters))
    # One maximum over the logits a forward kernel; one local and one global layer a block.
    assert runs["reduce_max"] == 2 * forward_kernels, f"forward kernels under remat {remat}"
    assert runs["ppermute"] == permutes, f"keys, values and their gradients, and segment ids, under remat {remat}"


@pytest.mark.slow
def test_rematerialisation_changes_no_gradient() -> None:
    parameters = make_parameters()
    results = []
    for remat in ("none", "attention", "full"):
        config = make_config("all_gather", "halo", "dual_chunk_swap", remat=remat)
        step, _, _ = make_step(config, make_mesh("all_gather"), "dual_chunk_swap", "float64")
        program = jax.jit(step).lower(parameters).compile(compiler_options={"xla_backend_optimization_level": 0})
        results.append(jax.tree.leaves(program(parameters)))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert np.abs(one - two).max() <= 1e-12 * np.abs(one).max(), "recomputing must not change a gradient"


@pytest.mark.slow
def test_bfloat16_activations_keep_float32_parameters_gradients_close() -> None:
    parameters = jax.tree.map(lambda weights: weights.astype(np.float32), make_parameters())
    config = make_config("all_gather", "halo", "contiguous")
    step, hidden, target = make_step(config, make_mesh("all_gather"), "contiguous", "bfloat16")
    loss, gradients = jax.jit(step)(parameters)
    assert all(gradient.dtype == jnp.float32 for gradient in jax.tree.leaves(gradients)), "parameters stay float32"
    expected_loss, expected = reference(parameters, hidden, target)
    # Four layers of bfloat16 activations: each of some twenty roundings is at most 2^-9 of a value.
    assert abs(loss - expected_loss) <= 20 * 2**-9 * expected_loss, "the loss"
    for one, two in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(one - two) <= 20 * 2**-9 * np.linalg.norm(two), "a parameter's gradient"


@pytest.mark.parametrize(
    ("fields", "places", "message"),
    [({}, 1, "parameters must hold 2 layers, one a place, got 1"), ({"remat": "some"}, 2, "remat must be one of none")],
)
def test_a_model_that_does_not_fit_is_refused(fields, places, message) -> None:
    config = make_config("all_gather", "halo", "contiguous", **fields)
    with pytest.raises(ValueError, match=message):
        decode(make_parameters()[:places], jnp.zeros((1, 24, MODEL)), mesh=make_mesh("all_gather"), config=config)
