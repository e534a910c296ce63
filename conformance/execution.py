"""Runs one target on one case, in the worker process: one jitted program, two data draws, every output on the host.

The program holds the primal call, the VJP's own forward and the gradients, for `attention` and, where the target has
it, `attention_with_lse`: under `jax.custom_vjp` these are different code, and all of it is looked at.
May touch: JAX and the target; never the oracle's answer. Tests: tests/conformance/execution/test_*.py.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from conformance.calling import ContractBroken, Named, Setting, forward, forward_and_gradients, numerics_facts
from conformance.designated import asks_programs
from conformance.empty_rows import without_empty_row_cotangents
from conformance.further import further_facts
from conformance.inputs import NUM_DRAWS, Inputs, inputs_of, redraw
from conformance.mesh import mesh_of, shardings_of
from conformance.other_programs import other_programs
from conformance.problem import Case
from conformance.program_facts import program_facts
from conformance.races.kernels import copying_kernels
from conformance.target import Declined, Target, calls_of
from conformance.variants import variant_inputs, variants_of

# Beyond this, running an unoptimised program takes longer than optimising it would have (measured on two CPU cores).
_MANY_LOGITS = 4_000_000

# What JAX says of a Pallas kernel that is to be compiled for a CPU.
_NOT_INTERPRETED = "Only interpret mode is supported on CPU backend"

Report = Callable[[str], None]


@dataclass(frozen=True)
class Program:
    """One program, as JAX traced it and as XLA compiled it."""

    traced: Any
    compiled: Any


def execute(
    target: Target, case: Case, report: Report, checks: Collection[str] = ()
) -> tuple[Named, dict[str, np.ndarray]]:
    """Runs the case and says what happened, as a message and arrays for the channel.

    The message has `declined` (a reason), `raised` (type, message, traceback, where), `broken` (tensor, quality,
    expected, got) or none of these; `misplaced` lists outputs that lie elsewhere than the contract says, `diverged`
    those whose copies on several devices are not the same; `facts`, where the check `collectives` asks for them, are
    program_facts of the program; further_facts and numerics_facts are added. Arrays are named `draw/call/tensor`, in
    layout order; those of the further data that `checks` want, `variant/call/tensor` (a program without gradients runs
    on the draws alone). `report` is told the phase that begins.
    """
    try:
        reason = target.supports(case.problem)
        if not isinstance(reason, str | None):
            raise TypeError(f"supports must return None, or the reason to decline as a str, got {reason!r}")
    except Declined as error:
        return {"declined": str(error)}, {}
    except Exception as error:  # noqa: BLE001  # whatever foreign code raises is a finding, not a failure of ours
        return what_was_raised(error, "supports"), {}
    if reason is not None:
        return {"declined": reason}, {}
    mesh = mesh_of(case.problem, jax.devices())
    setting = Setting(target, case.problem, mesh, calls_of(target.description, case), checks)
    try:
        numerics = numerics_facts(target, case.problem, mesh)
    except Exception as error:  # noqa: BLE001  # see above
        return what_was_raised(error, "uses_tpu_precision"), {}
    message, arrays = _execute_on(setting, case, report)
    return message | numerics, arrays


def _execute_on(setting: Setting, case: Case, report: Report) -> tuple[Named, dict[str, np.ndarray]]:
    with jax.default_matmul_precision(case.problem.precision):
        message, arrays = _execute_supported(setting, case, report)
        if _NOT_INTERPRETED not in message.get("raised", {}).get("message", ""):
            return message, arrays
        from jax.experimental.pallas import tpu as pltpu  # it takes a second, and few targets need it

        # Kernels for TPUs that their author compiles only: on CPU, all of the case runs interpreted.
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
            return _execute_supported(setting, case, report)


def _execute_supported(setting: Setting, case: Case, report: Report) -> tuple[Named, dict[str, np.ndarray]]:
    report("making inputs")
    inputs = [inputs_of(redraw(case, draw)) for draw in range(NUM_DRAWS)]
    draws = [_placed(setting, _taken(setting, draw_inputs)) for draw_inputs in inputs]
    report("tracing and compiling")
    try:
        program = compiled_program(setting, forward_and_gradients, draws[0])
    except Exception as error:  # noqa: BLE001  # see above
        failed = error
    else:
        message, arrays = _run(setting, program, draws, report, _variants(setting, case, inputs))
        if "raised" in message:
            return message, arrays
        for further in (
            _races(setting, program, draws, report),
            further_facts(setting, case, draws[0], report),
            _other_programs(setting, case, draws[0], report),
        ):
            message, arrays = message | further[0], arrays | further[1]
        return message, arrays
    # Outside of the except clause: what the forward raises again is no consequence of our having caught it.
    return _forward_alone(setting, draws, failed, report)


def _other_programs(setting: Setting, case: Case, arrays: Named, report: Report) -> tuple[Named, dict[str, np.ndarray]]:
    if "invariance" not in setting.checks or not asks_programs(case):
        return {}, {}
    report("calling other problems, then this one again")
    return other_programs(setting, case, arrays, lambda other, inputs: _placed(other, _taken(other, inputs)))


def _races(
    setting: Setting, program: Program, draws: list[Named], report: Report
) -> tuple[Named, dict[str, np.ndarray]]:
    if "races" not in setting.checks:
        return {}, {}
    kernels = copying_kernels(program.traced)
    if not kernels:
        return {"races": {"kernels": []}}, {}
    from conformance.races.program import race_facts  # imports Pallas for TPUs, which takes a second

    facts, arrays = race_facts(setting, draws, kernels, report)
    return {"races": facts}, arrays


def _forward_alone(
    setting: Setting, draws: list[Named], first: Exception, report: Report
) -> tuple[Named, dict[str, np.ndarray]]:
    """Tells a target that fails from one that only has no gradient; the forward of the latter is still compared."""
    report("tracing and compiling the forward alone")
    try:
        program = compiled_program(setting, forward, draws[0])
    except Declined as error:
        return {"declined": str(error)}, {}
    except ContractBroken as error:
        return {"broken": [error.tensor, error.quality, error.expected, error.got]}, {}
    except Exception as error:  # noqa: BLE001  # see above
        return what_was_raised(error, "forward"), {}
    message, arrays = _run(setting, program, draws, report)
    return {**message, **what_was_raised(first, "gradient")}, arrays


def compiled_program(setting: Setting, function: Callable[[Setting, Named], Named], arrays: Named) -> Program:
    """One program. Workers compile cheaply (devices.py), which large arrays repay badly."""
    problem = setting.problem
    logits = problem.batch * problem.num_query_heads * problem.seq_len**2
    is_cheap = setting.mesh.devices.flat[0].platform == "cpu"
    # Measured on dense attention: as fast as level 3 makes it, compiled in three quarters of the time.
    options: Named | None = {"xla_backend_optimization_level": 1} if is_cheap and logits > _MANY_LOGITS else None
    traced = jax.jit(lambda arrays: function(setting, arrays)).trace(arrays)
    return Program(traced, traced.lower().compile(options))


def _variants(setting: Setting, case: Case, draw_inputs: list[Inputs]) -> Iterator[tuple[str, Named]]:
    """The further data that the checks want, by name: each is made and placed when its turn comes."""
    for name in variants_of(case, setting.checks):
        yield name, _placed(setting, _taken(setting, variant_inputs(case, name, draw_inputs)))


def _run(
    setting: Setting,
    program: Program,
    draws: list[Named],
    report: Report,
    variants: Iterable[tuple[str, Named]] = (),
) -> tuple[Named, dict[str, np.ndarray]]:
    """Runs the compiled program once a draw, then once a variant, one call in flight at a time."""
    arrays: dict[str, np.ndarray] = {}
    misplaced: dict[str, str] = {}
    diverged: dict[str, str] = {}
    data = itertools.chain(((str(draw), placed) for draw, placed in enumerate(draws)), variants)
    for prefix, placed in data:
        phase = f"draw {prefix}" if prefix.isdigit() else f"variant {prefix}"
        report(f"running {phase}")
        try:
            results = jax.block_until_ready(program.compiled(placed))
        except Exception as error:  # noqa: BLE001  # see above
            return what_was_raised(error, phase), arrays
        for name, array in results.items():
            arrays[f"{prefix}/{name}"] = np.asarray(array)
            if not prefix.isdigit():
                continue  # where an output lies does not depend on the data
            if place := misplacement(setting, name, array):
                misplaced[name] = place
            if difference := _difference_of_copies(array):
                diverged[name] = difference
    message: Named = {"misplaced": misplaced, "diverged": diverged}
    if "collectives" in setting.checks:
        cotangents = [name in ("dout", "dlse") for name in sorted(draws[0])]  # a dict's leaves are in this order
        message["facts"] = program_facts(program.traced, program.compiled, cotangents)
    return message, arrays


def _taken(setting: Setting, inputs: Inputs) -> Inputs:
    """The inputs as this target takes them."""
    if setting.target.description.empty_rows == "undefined":
        return without_empty_row_cotangents(inputs, setting.problem)
    return inputs


def _placed(setting: Setting, inputs: Inputs) -> Named:
    """Fresh copies of the masters in layout order, placed on the mesh; absent inputs are left out."""
    order = setting.problem.positions()
    shardings = shardings_of(setting.problem, setting.mesh)
    placed: Named = {}
    for name in ("query", "key", "value", "segment_ids", "sinks", "dout", "dlse"):
        master = getattr(inputs, name)
        if master is None or (name == "value" and setting.problem.shared_kv):
            continue
        copy = np.array(master) if name == "sinks" else master[:, order]
        if setting.problem.dtype == "float64" and copy.dtype == np.float32:
            copy = copy.astype(np.float64)  # the exact tier: sinks and the cotangent of lse take part in float64
        placed[name] = jax.device_put(copy, shardings[name.removeprefix("d")])
    return placed


def misplacement(setting: Setting, name: str, array: jax.Array) -> str | None:
    """Where an output lies, if that is not where the contract says."""
    tensor = name.partition("/")[2].removesuffix(" of vjp")
    expected = shardings_of(setting.problem, setting.mesh)[tensor.removeprefix("d")]
    if array.sharding.is_equivalent_to(expected, array.ndim):
        return None
    return f"expected {expected.spec}, got {getattr(array.sharding, 'spec', array.sharding)}"


def _difference_of_copies(array: jax.Array) -> str | None:
    """Two devices that hold different bits of the same part of an array, if there are any.

    Reading an array reads one copy of each part; a wrong one elsewhere would never be seen.
    """
    first: dict[tuple[tuple[int | None, int | None], ...], jax.Shard] = {}
    for shard in array.addressable_shards:
        known = first.setdefault(tuple((part.start, part.stop) for part in shard.index), shard)
        if np.asarray(known.data).tobytes() != np.asarray(shard.data).tobytes():
            return f"{known.device} and {shard.device} hold different values"
    return None


def what_was_raised(error: BaseException, where: str) -> Named:
    """`raised` of the message: what foreign code raised, in a form that the channel can carry."""
    told = traceback.TracebackException.from_exception(error)  # str(error) is foreign code, and may raise itself
    lines = "".join(told.format()).rstrip()
    return {"raised": {"type": type(error).__name__, "message": str(told)[:2000], "traceback": lines, "where": where}}
