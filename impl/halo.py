"""The halo strategy: every chunk receives only the keys that its window reaches, from the ranks that hold them.

Communication is `lax.ppermute` along the context axis by the plan in exchange.py, hidden behind queries that need no
halo (halo_spans.py); gradients of received rows travel the same way back, in float32.
Tested in tests/impl/test_strategies.py, test_halo.py and wire/test_aot.py.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array

from impl import exchange, halo_fetch, halo_pallas, local_attention
from impl.exchange import HaloPlan
from impl.halo_spans import Span, spans_of
from impl.kernels.interface import KernelOperands, LocalGradients, RowCotangents, accumulation_dtype
from impl.layer import Layer
from impl.sharded import sharded_attention
from impl.strategy import Operands, Received, Strategy

Tree = TypeVar("Tree")
Other = TypeVar("Other")
Result = TypeVar("Result")


def halo(operands: Operands, layer: Layer, mesh: Mesh) -> tuple[Array, Array]:
    """Attention of global arrays whose K and V reach the queries by halo exchange; returns (out, lse).

    A rank receives the rows of its halo once, in the forward; in the backward only their gradients travel, back home.
    """
    return sharded_attention(operands, _strategy(layer), layer, mesh)


def _strategy(layer: Layer) -> Strategy:
    if layer.kernel != "pallas_halo":
        return Strategy(_forward, _backward)
    return halo_pallas.STRATEGY if layer.halo_transfer == "permute" else halo_fetch.STRATEGY


def plan_of(layer: Layer) -> HaloPlan:
    """The exchange of a layer with a window."""
    return exchange.halo_plan(layer.layout, layer.context_parallelism, layer.seq_len, layer.kernel_config.window)


def _forward(operands: Operands, layer: Layer) -> tuple[Array, Array, Received]:
    interior, boundary = _spans(layer)
    send = functools.partial(exchange.exchange, plan=plan_of(layer), axis_name=layer.context_axis)
    ids = operands.segment_ids
    received = Received(send(operands.key), send(operands.value), () if ids is None else send(ids))
    calls = _on_spans(local_attention.launched, interior, operands, received, layer)
    # The interior's kernels run before anybody waits for the halo, which is on its way from the start.
    arrived = received
    if interior and boundary:
        raw, arrived = _after([call.result for call in calls], received)
        calls = [call._replace(result=result) for call, result in zip(calls, raw, strict=True)]
    calls += _on_spans(local_attention.launched, boundary, operands, arrived, layer)
    results = [local_attention.finished(call, layer) for call in calls]
    out, lse = (_in_order(parts, [*interior, *boundary]) for parts in zip(*results, strict=True))
    return out, lse, received


def _backward(operands: Operands, received: Received, cotangents: RowCotangents, layer: Layer) -> LocalGradients:
    plan, (interior, boundary) = plan_of(layer), _spans(layer)
    # The boundary's kernels run first, so that the gradients of its halo travel home while the interior's run.
    outer = _on_spans(local_attention.backward, boundary, operands, received, layer, cotangents)
    outer, inner_operands = _after(outer, operands) if interior and boundary else (outer, operands)
    own, halo_gradients = _key_gradients(boundary, outer, operands, received, layer)
    send_home = functools.partial(exchange.send_home, plan=plan, axis_name=layer.context_axis)
    arrived = [send_home(rows) for rows in halo_gradients]
    calls = _on_spans(local_attention.launched_backward, interior, inner_operands, received, layer, cotangents)
    if interior and boundary:
        raw, arrived = _after([call.result for call in calls], arrived)
        calls = [call._replace(result=result) for call, result in zip(calls, raw, strict=True)]
    inner = [local_attention.finished_backward(call, layer) for call in calls]
    inner_own, _ = _key_gradients(interior, inner, operands, received, layer)
    dkey, dvalue = (
        exchange.add_arrived(_total(parts), rows, plan)
        for *parts, rows in zip(*(gradients for gradients in (own, inner_own) if gradients), arrived, strict=True)
    )
    gradients = [*inner, *outer]
    return LocalGradients(
        dquery=_in_order([part.dquery for part in gradients], [*interior, *boundary]),
        dkey=dkey,
        dvalue=dvalue,
        dsinks=None if operands.sinks is None else _total([part.dsinks for part in gradients]),
    )


def _spans(layer: Layer) -> tuple[list[Span], list[Span]]:
    """The spans of all of a rank's chunks: (those that need no halo, those that do)."""
    plan = plan_of(layer)
    spans = [span for slot in range(len(plan.key_runs)) for span in spans_of(plan, layer.kernel_config.window, slot)]
    return [span for span in spans if span.interior], [span for span in spans if not span.interior]


def _on_spans(
    kernel: Callable[..., Result],
    spans: Sequence[Span],
    operands: Operands,
    received: Received,
    layer: Layer,
    cotangents: RowCotangents | None = None,
) -> list[Result]:
    """One kernel call for each span: its queries (and their cotangents), and the contiguous keys that they see."""
    plan, rank = plan_of(layer), lax.axis_index(layer.context_axis)
    keys = _keys_of(spans, operands.key, received.key, layer)
    values = _keys_of(spans, operands.value, received.value, layer)
    ids = operands.segment_ids
    key_ids = [None] * len(spans) if ids is None else _keys_of(spans, ids, received.segment_ids, layer)
    results = []
    for index, span in enumerate(spans):
        first = span.slot * plan.chunk + span.first_query
        queries = slice(first, first + span.queries)
        call = KernelOperands(
            operands.query[:, queries],
            keys[index],
            values[index],
            exchange.chunk_positions(plan, span.slot, rank)[span.first_query : span.first_query + span.queries],
            exchange.key_positions(plan, span.slot, rank)[span.first_key : span.first_key + span.keys],
            None if ids is None else ids[:, queries],
            key_ids[index],
            operands.sinks,
        )
        rows = () if cotangents is None else (jax.tree.map(operator.itemgetter((slice(None), queries)), cotangents),)
        results.append(kernel(call, *rows, layer, span.key_offset(plan.key_runs[span.slot].rows_before)))
    return results


def _keys_of(spans: Sequence[Span], own: Array, received: Sequence[Array], layer: Layer) -> list[Array]:
    """The keys of each span, out of the rank's own rows and those it received; linear in both.

    An interior span's are sliced from the own rows directly: they must not depend on anything that travels.
    """
    plan, rank = plan_of(layer), lax.axis_index(layer.context_axis)
    runs = exchange.key_runs(own, received, plan, rank) if not all(span.interior for span in spans) else ()
    keys = []
    for span in spans:
        in_chunk = span.first_key - plan.key_runs[span.slot].rows_before
        first = span.slot * plan.chunk + in_chunk if span.interior else span.first_key
        keys.append((own if span.interior else runs[span.slot])[:, first : first + span.keys])
    return keys


def _key_gradients(
    spans: Sequence[Span], gradients: Sequence[LocalGradients], operands: Operands, received: Received, layer: Layer
) -> tuple[list[Array], list[Sequence[Array]]]:
    """Of key and value: (gradients of the rank's own rows, gradients of the rows it received), as the spans see them.

    The transpose of `_keys_of`, in the accumulation dtype.
    """
    if not spans:
        return [], [(), ()]
    own_gradients, halo_gradients = [], []
    for own, halo_rows, parts in (
        (operands.key, received.key, [part.dkey for part in gradients]),
        (operands.value, received.value, [part.dvalue for part in gradients]),
    ):
        avals = jax.tree.map(
            lambda rows: jax.ShapeDtypeStruct(rows.shape, accumulation_dtype(rows.dtype)), (own, halo_rows)
        )
        transpose = jax.linear_transpose(lambda own, received: _keys_of(spans, own, received, layer), *avals)
        own_gradient, halo_gradient = transpose(parts)
        own_gradients.append(own_gradient)
        halo_gradients.append(halo_gradient)
    return own_gradients, halo_gradients


def _after(first: Tree, then: Other) -> tuple[Tree, Other]:
    """Both unchanged, but whatever uses `then` runs after what makes `first`: fixes the order of the schedule."""
    return lax.optimization_barrier((first, then))


def _in_order(parts: Sequence[Array], spans: Sequence[Span]) -> Array:
    """Puts the spans' rows back into the rank's order."""
    order = sorted(range(len(spans)), key=lambda index: (spans[index].slot, spans[index].first_query))
    return parts[0] if len(parts) == 1 else jnp.concatenate([parts[index] for index in order], axis=1)


def _total(parts: Sequence[Any]) -> Any:
    return functools.reduce(jnp.add, parts)
