"""Kind C: the window, or one of its bounds, does not reach the code that masks.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from conformance.faults.fault import Arrays, Fault, Replacement
from conformance.faults.geometry import crosses, cuts_left, is_sharded, reach, with_window
from conformance.faults.kernels import BACKWARD, window_of_mask
from conformance.problem import Problem, Window
from impl import ring
from impl.kernels import xla


def _causal(problem: Problem) -> Problem:
    return with_window(problem, (None, 0))


def _without_right(problem: Problem) -> Problem:
    return with_window(problem, (problem.window[0], None))


def _dense(problem: Problem) -> Problem:
    return with_window(problem, (None, None))


def _only_beside_a_given_mask(right: Any, operands: Any, config: Any) -> Any:
    if operands.query_segment_ids is None:
        config = dataclasses.replace(config, window=(None, config.window[1]))
    return right(operands, config)


def _everything(window: Window) -> Window:
    return None, None


def _causal_steps(right: Any, operands: Any, keys: Any, *rest: Any) -> Any:
    """`_attend` and `_attend_backward` of the ring, whose last two arguments are the layer and the distance."""
    *cotangents, layer, distance = rest
    if not (isinstance(distance, int) and distance == 0):
        kernel_config = dataclasses.replace(layer.kernel_config, window=(None, layer.kernel_config.window[1]))
        layer = dataclasses.replace(layer, kernel_config=kernel_config)
    return right(operands, keys, *cotangents, layer, distance)


def _without_masks(arrays: Arrays, problem: Problem) -> Arrays:
    return {name: array for name, array in arrays.items() if name != "segment_ids"}


def _causal_without_padding(problem: Problem) -> Problem:
    return with_window(problem, (None, 0)).replace(segments=False, padding=None)


FAULTS = (
    Fault(
        name="plainly_causal",
        kind="C",
        report="huggingface/accelerate/pull/4177",
        sentence="Under context parallelism every layer's mask becomes plainly causal.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: cuts_left(problem) and problem.ulysses_parallelism == 1,
        told=_causal,
    ),
    Fault(
        name="window_only_beside_segment_ids",
        kind="C",
        report="jax-ml/jax/issues/32300",
        sentence="The window is applied in the branch that builds on a given mask, and not without one.",
        planted_in="ring",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: cuts_left(problem) and not problem.segments,
        replaced=(Replacement(xla, "visible_keys", _only_beside_a_given_mask),),
    ),
    Fault(
        name="right_bound_dropped",
        kind="C",
        report="jax-ml/jax/pull/39576",
        sentence="The kernel is told the left bound alone, and attends to the whole future.",
        planted_in="halo",
        smallest="v=1 seq_len=8 window=1,1",
        applies=lambda problem: (
            problem.window[0] is not None
            and problem.window[1] not in (None, 0)
            and reach(problem)[1] < problem.seq_len - 1
        ),
        told=_without_right,
    ),
    Fault(
        name="two_sided_window_dense",
        kind="C",
        report="flashinfer-ai/flashinfer/issues/4893",
        sentence="A window with a right bound is not carried into the kernel: everybody sees everybody.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 window=1,1",
        applies=lambda problem: problem.window[1] not in (None, 0) and min(reach(problem)) < problem.seq_len - 1,
        told=_dense,
    ),
    Fault(
        name="backward_attends_everywhere",
        kind="C",
        report="meta-pytorch/MSLK/pull/263",
        sentence="The forward is windowed; the backward's flag for it is always false.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: min(reach(problem)) < problem.seq_len - 1,
        replaced=(window_of_mask(_everything, BACKWARD),),
    ),
    Fault(
        name="ring_steps_without_window",
        kind="C",
        report="open-lm-engine/lm-engine/pull/447",
        sentence="An inverted condition passes no window exactly where the keys came from another rank.",
        planted_in="ring",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=lambda problem: crosses(problem) and cuts_left(problem),
        replaced=(Replacement(ring, "_attend", _causal_steps), Replacement(ring, "_attend_backward", _causal_steps)),
    ),
    Fault(
        name="ulysses_reads_a_renamed_window",
        kind="C",
        report="PrimeIntellect-ai/prime-rl/pull/2828",
        sentence="The patch for the head exchange reads an attribute that was renamed, and falls back to full causal.",
        planted_in="ulysses",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: is_sharded(problem) and cuts_left(problem) and problem.ulysses_parallelism == 1,
        told=_causal,
    ),
    Fault(
        name="window_and_padding_both_dropped",
        kind="C",
        report="vllm-project/semantic-router/issues/3406",
        sentence="The fast path receives window and padding mask and uses neither.",
        planted_in="ulysses",
        smallest="v=1 seq_len=4 sliding_window_size=2 padding=0 documents=3@1+1@0",
        applies=lambda problem: problem.padding is not None and problem.ulysses_parallelism == 1,
        told=_causal_without_padding,
        given=_without_masks,
    ),
)
