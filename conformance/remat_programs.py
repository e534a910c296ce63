"""A target's gradient under rematerialisation: what is computed and sent again, and what the gradients are then.

In the worker; the check `remat` judges. May touch: JAX and the target. Tests: tests/conformance/test_checks_remat.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from conformance.calling import Named, Setting, call_target
from conformance.program_facts import cost_facts, sent_bytes

PLAIN, NOTHING_SAVED, NAMES_SAVED = "plain", "nothing saved", "names saved"

Function = Callable[[Named, Named], Any]


def remat_facts(setting: Setting, arrays: Named) -> tuple[Named, dict[str, np.ndarray]]:
    """Facts of the gradient's program as it is (PLAIN, traced only), and under `jax.checkpoint`; its gradients there.

    Facts are `matmul_flops`, `sent_bytes`, and `raised` (type and message). Gradients are named `remat/program/tensor`.
    """
    programs = gradient_programs(setting)
    facts: Named = {PLAIN: _costs(programs.pop(PLAIN).trace(arrays))}
    gradients: dict[str, np.ndarray] = {}
    for name, program in programs.items():
        try:
            traced = program.trace(arrays)
            facts[name] = _costs(traced)
            results = jax.block_until_ready(traced.lower().compile()(arrays))
        except Exception as error:  # noqa: BLE001  # whatever foreign code raises is a finding, not a failure of ours
            facts[name] = {"raised": [type(error).__name__, repr(error)[:1000]]}
            continue
        gradients |= {f"remat/{name}/{tensor}": np.asarray(array) for tensor, array in results.items()}
    return facts, gradients


def gradient_programs(setting: Setting) -> dict[str, Any]:
    """Jitted functions of the arrays, to out and the gradients: PLAIN, and the same under `jax.checkpoint`.

    NOTHING_SAVED recomputes everything; NAMES_SAVED, where the target names its residuals, everything but those.
    """
    call: Function = functools.partial(_attention, setting)
    programs: dict[str, Function] = {PLAIN: call, NOTHING_SAVED: jax.checkpoint(call)}
    if names := setting.target.description.residual_names:
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        programs[NAMES_SAVED] = jax.checkpoint(call, policy=policy)
    return {name: _gradient(function) for name, function in programs.items()}


def _attention(setting: Setting, inputs: Named, others: Named) -> Any:
    return call_target(setting, "attention", {**others, **inputs})["out"]


def _gradient(function: Function) -> Any:
    def gradient(arrays: Named) -> Named:
        inputs = {name: arrays[name] for name in ("query", "key", "value", "sinks") if name in arrays}
        others = {name: array for name, array in arrays.items() if name not in inputs}
        out, vjp = jax.vjp(lambda inputs: function(inputs, others), inputs)
        (gradients,) = vjp(arrays["dout"])
        # As in a model, whose next layer needs it: a forward that nobody needs is not computed once, let alone twice.
        return {"out": out, **{f"d{name}": array for name, array in gradients.items()}}

    return jax.jit(gradient)


def _costs(traced: Any) -> Named:
    return {"matmul_flops": cost_facts(traced)["matmul_flops"], "sent_bytes": sent_bytes(traced)}
