"""Puts problems to a target that no case may have, and says how it answers: nothing runs, everything is only traced.

In the worker; the check `errors` judges. May touch: JAX and the target. Tests: tests/conformance/test_checks_errors.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from conformance.calling import ContractBroken, Setting, call_target
from conformance.input_shapes import input_shapes, placed_shapes
from conformance.mesh import mesh_of, shardings_of
from conformance.problem import Problem
from conformance.target import Declined


@dataclass(frozen=True)
class _Request:
    """A problem that breaks a rule: which part of it, how in words, and changes to the arrays that it calls for."""

    tensor: str
    words: str
    problem: Problem
    segment_ids: tuple[tuple[int, ...], str] | None = None
    whole_sequence: bool = False
    """The arrays lie whole on every rank: their length does not divide, so they cannot be spread over the ranks."""


def refusals(setting: Setting) -> list[dict[str, Any]]:
    """How the target answers each request: `how` is "refused", "raised" (with `type`, `message`) or "answered"."""
    return [
        {"tensor": request.tensor, "words": request.words, **_answer(setting, request)}
        for request in _requests(setting.problem)
        if request.problem.num_devices <= jax.device_count()
    ]


def unchecked(problem: Problem, **changes: Any) -> Problem:
    """The problem with fields that its own rules forbid: the rules of a dataclass are those of its constructor."""
    changed = object.__new__(type(problem))
    for field in dataclasses.fields(problem):
        object.__setattr__(changed, field.name, changes.get(field.name, getattr(problem, field.name)))
    return changed


def _requests(of_case: Problem) -> Iterator[_Request]:
    """Each is like the case's problem, but for one rule; on at least two ranks, with Auto axes."""
    ranks = max(2, of_case.context_parallelism)
    problem = of_case.replace(
        context_parallelism=ranks,
        seq_len=of_case.chunk_len * ranks * (of_case.num_chunks // of_case.context_parallelism),
        axis_types="auto",
    )
    for size in (0, -3):
        windowless = unchecked(problem, sliding_window_size=size, window=(size - 1, 0))
        yield _Request("window", f"sliding_window_size {size}", windowless)
    # Enough query heads for every way of spreading them, and one kv head fewer.
    heads = 4 * problem.tensor_parallelism * problem.ulysses_parallelism * ranks
    uneven = unchecked(problem, num_query_heads=heads, num_kv_heads=heads - 1)
    yield _Request("heads", "kv heads that do not divide the query heads", uneven)
    length = problem.seq_len + 1
    yield _Request(
        "sequence", "a length that does not divide into chunks", unchecked(problem, seq_len=length), None, True
    )
    with_ids = unchecked(problem, segments=True)
    rows = (problem.batch, problem.seq_len)
    yield _Request("segment_ids", "segment_ids of another length", with_ids, ((problem.batch, 2 * rows[1]), "int32"))
    yield _Request("segment_ids", "segment_ids without a batch axis", with_ids, ((rows[1],), "int32"))
    yield _Request("segment_ids", "segment_ids of float32", with_ids, (rows, "float32"))


def _answer(setting: Setting, request: _Request) -> dict[str, Any]:
    target, problem = setting.target, request.problem
    asked = Setting(target, problem, mesh_of(problem, jax.devices()), ("attention",))
    try:
        if target.supports(problem) is not None:
            return {"how": "refused"}
        jax.jit(lambda arrays: call_target(asked, "attention", arrays)).trace(_arrays(asked, request))
    except (Declined, ValueError):
        return {"how": "refused"}
    except ContractBroken as error:
        return {"how": "raised", "type": "an answer of another form", "message": str(error)}
    except Exception as error:  # noqa: BLE001  # whatever foreign code raises is looked at
        return {"how": "raised", "type": type(error).__name__, "message": repr(error)[:500]}
    return {"how": "answered"}


def _arrays(setting: Setting, request: _Request) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays that the problem's numbers call for, placed as the contract says where they divide."""
    problem = setting.problem
    shapes = input_shapes(problem)
    del shapes["dout"]
    if request.segment_ids is not None:
        shapes["segment_ids"] = request.segment_ids
    placed = {}
    for name, (shape, _) in shapes.items():
        batch, sequence, *rest = (*shardings_of(problem, setting.mesh)[name].spec, None)
        if name == "sinks":
            continue
        axes = (sequence,) if len(shape) == 1 else (batch, None if request.whole_sequence else sequence, *rest)
        placed[name] = NamedSharding(setting.mesh, PartitionSpec(*axes[: len(shape)]))
    return placed_shapes(problem, setting.mesh, shapes, placed)
