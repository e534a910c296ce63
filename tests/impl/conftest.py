"""Runs one small attention layer on a simulated mesh and holds it against the oracle: what most tests in here do.

Fixtures: `make_case` (a layer, its mesh and its data), `run_case` (out, lse and gradients in position order, beside the
oracle's), `check_exact` (asserts that they agree in float64). May touch: JAX's float64 switch, for the test's duration.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import impl
import oracle

EXACT = 1e-12
"""How far float64 runs may stray: DESIGN and TESTING call for agreement "to about 1e-12" on values of order one."""

TENSORS = ("out", "lse", "dquery", "dkey", "dvalue", "dsinks")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer on a mesh. `documents`: lengths of the documents of a batch row; every second row has them reversed.

    `axes` may name "expert": an axis of size 2 that the layer does not use.
    """

    strategy: str = "halo"
    global_strategy: str = ""
    layout: str = "contiguous"
    context: int = 4
    data: int = 1
    tensor: int = 1
    ulysses: int = 1
    axes: tuple[str, ...] = ("data", "context", "tensor")
    axis_types: tuple[AxisType, ...] = (AxisType.Auto,) * 3
    batch: int = 2
    seq_len: int = 48
    num_query_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 6
    window: tuple[int | None, int | None] = (5, 0)
    attention_type: impl.AttentionType = impl.AttentionType.LOCAL_SLIDING
    documents: tuple[int, ...] | None = None
    padding: bool = False
    sinks: bool = False
    attn_logits_soft_cap: float | None = None
    scale: float | None = None
    dtype: str = "float64"
    local_kernel: str = ""

    @property
    def config(self) -> impl.AttentionConfig:
        is_global = self.attention_type is impl.AttentionType.GLOBAL
        return impl.AttentionConfig(
            context_parallel_strategy=self.global_strategy
            or ("all_gather" if self.strategy == "halo" else self.strategy),
            local_context_parallel_strategy=self.strategy,
            context_parallel_load_balance=self.layout != "contiguous",
            context_parallel_reorder_strategy="dual_chunk_swap" if self.layout == "contiguous" else self.layout,
            window=None if is_global else self.window,
            attn_logits_soft_cap=self.attn_logits_soft_cap,
            scale=self.scale,
            local_kernel=self.local_kernel,
        )

    @property
    def mesh(self) -> Mesh:
        sizes = {"data": self.data, "context": self.context, "tensor": self.tensor, "expert": 2}
        sizes["ulysses"] = self.ulysses
        shape = [sizes[axis] for axis in self.axes]
        devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
        return Mesh(devices, self.axes, axis_types=(self.axis_types * 2)[: len(self.axes)])

    @property
    def padding_segment_id(self) -> int | None:
        return 9 if self.padding else None

    def data_of(self, seed: int = 0) -> dict[str, np.ndarray | None]:
        """Arrays in position order: peaked logits, sinks of the logits' size, repeated, unsorted and negative ids."""
        random = np.random.default_rng(seed)
        queries = (self.batch, self.seq_len, self.num_query_heads)
        keys = (self.batch, self.seq_len, self.num_kv_heads)
        dtype = jnp.dtype(self.dtype)
        sink_dtype = "float64" if self.dtype == "float64" else "float32"
        return {
            "query": 2 * random.standard_normal((*queries, self.head_dim)).astype(dtype),
            "key": random.standard_normal((*keys, self.head_dim)).astype(dtype),
            "value": random.standard_normal((*keys, self.value_dim)).astype(dtype),
            "sinks": (2 * random.standard_normal(self.num_query_heads)).astype(sink_dtype) if self.sinks else None,
            "dout": random.standard_normal((*queries, self.value_dim)).astype(dtype),
            "dlse": random.standard_normal(queries).astype(sink_dtype),
            "segment_ids": self._segment_ids(),
        }

    def _segment_ids(self) -> np.ndarray | None:
        if self.documents is None:
            return None
        assert sum(self.documents) == self.seq_len, "documents must fill the sequence"
        names = [7, -3, 9, 0, 7, 2]
        ids = [names[index % len(names)] for index in range(len(self.documents))]
        row = np.repeat(np.array(ids, np.int32), self.documents)
        return np.stack([row if index % 2 == 0 else row[::-1] for index in range(self.batch)])

    def place(self, name: str, array: np.ndarray) -> jax.Array:
        """Puts an array in position order into the layout and onto the mesh, as DESIGN.md places a target's arrays."""
        axis = {name: name if name in self.axes else None for name in ("data", "context", "tensor")}
        heads = axis["tensor"]
        if name in ("key", "value") and self.num_kv_heads % self.tensor:
            heads = None
        if name == "sinks":
            return jax.device_put(array, NamedSharding(self.mesh, PartitionSpec(heads)))
        sequence = ("context", "ulysses") if "ulysses" in self.axes else axis["context"]
        spec = PartitionSpec(axis["data"], sequence, *(() if array.ndim == 2 else (heads,)))
        in_layout = array[:, oracle.layout.permutation(self.layout, self.seq_len, self.context)]
        return jax.device_put(in_layout, NamedSharding(self.mesh, spec))

    def collect(self, name: str, array: jax.Array) -> np.ndarray:
        """The inverse of `place`, in float64."""
        values = np.asarray(array).astype(np.float64)
        if name in ("sinks", "dsinks"):
            return values
        return values[:, oracle.layout.inverse_permutation(self.layout, self.seq_len, self.context)]

    def attention(self, query, key, value, sinks, segment_ids) -> tuple[jax.Array, jax.Array]:
        return impl.attention(
            query,
            key,
            value,
            mesh=self.mesh,
            config=self.config,
            attention_type=self.attention_type,
            segment_ids=segment_ids,
            padding_segment_id=self.padding_segment_id,
            sinks=sinks,
            return_lse=True,
        )

    def attention_and_gradients(self, query, key, value, sinks, segment_ids, dout, dlse):
        """(out, lse) and the gradients of query, key, value (and sinks, where the layer has them)."""
        differentiated = (query, key, value) if sinks is None else (query, key, value, sinks)

        def forward(query, key, value, sinks=None):
            return self.attention(query, key, value, sinks, segment_ids)

        result, vjp = jax.vjp(forward, *differentiated)
        return result, vjp((dout, dlse))

    def arguments(self, seed: int = 0) -> tuple[jax.Array | None, ...]:
        """The placed arguments of `attention_and_gradients`."""
        names = ("query", "key", "value", "sinks", "segment_ids", "dout", "dlse")
        data = self.data_of(seed)
        return tuple(None if data[name] is None else self.place(name, data[name]) for name in names)

    def expected(self, seed: int = 0) -> dict[str, np.ndarray | None]:
        """The oracle's answer."""
        data = self.data_of(seed)
        dout, dlse = data.pop("dout"), data.pop("dlse")
        window = (None, 0) if self.attention_type is impl.AttentionType.GLOBAL else self.window
        keywords = {
            "window": window,
            "segment_ids": data["segment_ids"],
            "padding_segment_id": self.padding_segment_id,
            "attn_logits_soft_cap": self.attn_logits_soft_cap,
            "sinks": data["sinks"],
            "scale": self.scale,
        }
        inputs = (data["query"], data["key"], data["value"])
        result = oracle.attention(*inputs, **keywords)
        gradients = oracle.attention_vjp(*inputs, dout=dout, dlse=dlse, **keywords)
        return {**result._asdict(), **gradients._asdict()}


def compiled_quickly(function: Callable, *arguments):
    """Compiles without XLA's optimisations, which would take most of a test's time and change nothing that it asks."""
    return jax.jit(function).lower(*arguments).compile(compiler_options={"xla_backend_optimization_level": 0})


def equations(function: Callable, *arguments) -> list:
    """Every equation of the traced function, those of inner jaxprs included."""
    found = []

    def walk(jaxpr) -> None:
        for equation in jaxpr.eqns:
            found.append(equation)
            for value in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found


@pytest.fixture
def traced_equations() -> Callable[..., list]:
    return equations


@pytest.fixture(autouse=True)
def _float64_is_available():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def make_case() -> type[Case]:
    return Case


@pytest.fixture
def run_case() -> Callable[[Case], dict[str, tuple[np.ndarray, np.ndarray]]]:
    """For each tensor: (what the implementation computes, what the oracle does), in position order, float64."""

    def run(case: Case, seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        arguments = case.arguments(seed)
        result, gradients = compiled_quickly(case.attention_and_gradients, *arguments)(*arguments)
        expected = case.expected(seed)
        computed = dict(zip(TENSORS, (*result, *gradients), strict=False))
        assert ("dsinks" in computed) == case.sinks, "a gradient for each differentiable input"
        return {name: (case.collect(name, array), np.asarray(expected[name])) for name, array in computed.items()}

    return run


@pytest.fixture
def check_exact(run_case) -> Callable[..., None]:
    """Asserts that a float64 layer's out, lse and gradients are the oracle's."""

    def check(**fields) -> None:
        case = Case(**fields)
        for name, (computed, expected) in run_case(case).items():
            assert computed.shape == expected.shape, f"{name} has shape {computed.shape}, not {expected.shape}: {case}"
            empty = np.isneginf(expected)
            assert np.array_equal(np.isneginf(computed), empty), f"{name} is -inf in other rows than it should: {case}"
            error = np.abs(np.where(empty, 0, computed) - np.where(empty, 0, expected)).max()
            assert error <= EXACT, f"{name} is off by {error:.3g}: {case}"

    return check
