"""The smallest planted error that is seen in 99 % of cases: by the allowance, and by a fixed tolerance.

    python bench/resolution.py [--seeds N] [--kinds plain,peaked,...] [--dtypes float32,bfloat16]

A legal NumPy algorithm's answer (its own rounding included) gets a fault's effect added, scaled until its largest
change of an element is a given fraction of the tensor's root-mean-square, and is stored in its dtype. For each case
the smallest fraction that is seen is found by bisection (inf: more than 10, or the legal answer fails without any
fault). Printed: its 99th percentile over all cases, by our allowance and by a fixed tolerance; then, for each kind of
values, how many times finer ours is. "any": the best of all tensors but lse, which most targets do not return.
"fixed" is what the tests of JAX splash attention allow (jax, tests/pallas/tpu_splash_attention_kernel_test.py): out
3e-3 + 3e-3 |ref|, lse 1e-3 + 1e-3 |ref|, gradients 2e-2 + 3e-2 |ref|; dsinks as the other gradients.
"""

import argparse
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import legal_algorithms
import ml_dtypes
import numpy as np
from oracle_cases import KINDS, TENSORS, Shape, draw, is_structured

import oracle
from oracle.budget import Precision, answer_with_allowances, share

SHAPES = (
    Shape(seq=256, window=(127, 0)),
    Shape(seq=256, window=(31, 0), attn_logits_soft_cap=20.0),
    Shape(seq=128, window=(7, 0), head_dim=128, value_dim=128),
)
FIXED = {"out": (3e-3, 3e-3), "lse": (1e-3, 1e-3)} | dict.fromkeys(TENSORS[2:], (2e-2, 3e-2))
FAULTS = ("extra key", "lost key", "key's gradient lost", "relative error", "bfloat16 sums")
FRACTIONS = np.logspace(-8, 1, 91)  # of the tensor's root-mean-square, ten to a decade


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="seeds for each kind of values and shape")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of values, comma-separated")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="dtypes, comma-separated")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",")
    print(f"{'dtype':9} {'fault':20} {'tensor':7} {'ours':>9} {'fixed':>9}   finer by: {'  '.join(kinds)}")
    for dtype in arguments.dtypes.split(","):
        found: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
        for kind, shape, seed in itertools.product(kinds, SHAPES, range(arguments.seeds)):
            for fault, tensor, ours, fixed in resolutions(dtype, kind, shape, 5000 + seed):
                found[fault, tensor, kind].append((ours, fixed))
        for fault, tensor in itertools.product(FAULTS, (*TENSORS, "any")):
            by_kind = {kind: found[fault, tensor, kind] for kind in kinds}
            if everything := list(itertools.chain(*by_kind.values())):
                ours, fixed = percentiles(everything)
                finer = "  ".join(times_finer(pairs).rjust(len(kind)) for kind, pairs in by_kind.items())
                print(f"{dtype:9} {fault:20} {tensor:7} {ours:9.2g} {fixed:9.2g}             {finer}", flush=True)


def percentiles(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """The 99th percentile of ours and of the fixed tolerance's."""
    ours, fixed = (float(np.quantile([pair[i] for pair in pairs], 0.99, method="higher")) for i in (0, 1))
    return ours, fixed


def times_finer(pairs: list[tuple[float, float]]) -> str:
    """How many times finer ours is, - where the fault does not bite."""
    if not pairs:
        return "-"
    ours, fixed = percentiles(pairs)
    return "?" if np.isinf(ours) else f"{fixed / ours:.2g}"


def resolutions(dtype: str, kind: str, shape: Shape, seed: int) -> Iterator[tuple[str, str, float, float]]:
    """(fault, tensor, smallest error that our allowance sees, smallest that the fixed tolerance sees) of one case."""
    case = draw(kind, seed, dtype, shape)
    right, allowed = answer_with_allowances(**case, precision=Precision(dtype), structured_values=is_structured(kind))
    legal = legal_answer(case, dtype)
    for fault in FAULTS:
        best = []
        for tensor, change in changes(fault, case, right, seed).items():
            expected = getattr(right, tensor)
            scale = np.sqrt(np.mean(expected**2))
            if np.abs(change).max() <= 1e-9 * scale:
                continue  # the fault does not bite here: values that are all equal average to the same
            unit = change * (scale / np.abs(change).max())
            wrong = _Wrong(legal[tensor], unit, "float32" if tensor in ("lse", "dsinks") else dtype)
            absolute, relative = FIXED[tensor]
            ours = wrong.smallest_seen(expected, getattr(allowed, tensor))
            fixed = wrong.smallest_seen(expected, absolute + relative * np.abs(expected))
            yield fault, tensor, ours, fixed
            if tensor != "lse":
                best.append((ours, fixed))
        if best:
            yield fault, "any", min(ours for ours, _ in best), min(fixed for _, fixed in best)


class _Wrong(NamedTuple):
    """A tensor of a legal answer, the effect of a fault on it (of size 1), and the dtype that it is stored in."""

    legal: np.ndarray
    unit: np.ndarray
    dtype: str

    def smallest_seen(self, expected: np.ndarray, allowance: np.ndarray) -> float:
        """The smallest of FRACTIONS that is seen, if larger ones are too; inf if not even the largest is, or if the
        legal answer fails by itself: what cannot be used sees nothing."""

        def is_seen(fraction: float) -> bool:
            return bool(share(stored(self.legal + fraction * self.unit, self.dtype), expected, allowance).max() > 1)

        if is_seen(0.0) or not is_seen(FRACTIONS[-1]):
            return np.inf
        low, high = -1, len(FRACTIONS) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_seen(FRACTIONS[middle]) else (middle, high)
        return float(FRACTIONS[high])


def changes(fault: str, case: dict[str, Any], right: oracle.budget.Answer, seed: int) -> dict[str, np.ndarray]:
    """The whole effect of a fault on each tensor that it reaches."""
    left = case["window"][0]
    match fault:
        case "extra key" | "lost key":
            window = (left + 1 if fault == "extra key" else left - 1, 0)
            wider: dict[str, Any] = {**case, "window": window}
            wrong, _ = answer_with_allowances(**wider, precision=Precision("float64"))
            return {tensor: getattr(wrong, tensor) - getattr(right, tensor) for tensor in TENSORS}
        case "key's gradient lost":
            position = np.random.default_rng(seed).integers(right.dkey.shape[1])
            lost = {tensor: np.zeros_like(getattr(right, tensor)) for tensor in ("dkey", "dvalue")}
            for tensor, change in lost.items():
                change[:, position, 0] = -getattr(right, tensor)[:, position, 0]
            return lost
        case "relative error":
            return {tensor: getattr(right, tensor) for tensor in TENSORS}
        case _:
            exact = {"dkey": right.dkey, "dvalue": right.dvalue}
            return {tensor: bfloat16_sums(case, tensor) - exact[tensor] for tensor in exact}


def bfloat16_sums(case: dict[str, Any], tensor: str) -> np.ndarray:
    """dkey or dvalue added up over eight runs of queries, in bfloat16 after each."""
    seq = case["query"].shape[1]
    total = None
    for rank in range(8):
        dout, dlse = np.zeros_like(case["dout"]), np.zeros_like(case["dlse"])
        run = slice(rank * seq // 8, (rank + 1) * seq // 8)
        dout[:, run], dlse[:, run] = case["dout"][:, run], case["dlse"][:, run]
        of_rank: dict[str, Any] = {**case, "dout": dout, "dlse": dlse}
        part = getattr(oracle.attention_vjp(**of_rank), tensor)
        total = stored(part if total is None else total + part, "bfloat16")
    assert total is not None, "there are eight runs"
    return total


def legal_answer(case: dict[str, Any], dtype: str) -> dict[str, np.ndarray]:
    """What a plain flash algorithm of this dtype answers, as float64 in position order."""
    algorithm = legal_algorithms.Algorithm(dtype, key_block=64, rounded_probabilities=dtype == "bfloat16")
    problem = legal_algorithms.Problem(
        **{name: case[name][0].swapaxes(0, 1) for name in ("query", "key", "value", "dout", "dlse")},
        visible=oracle.mask.visible(case["query"].shape[1], window=case["window"])[0],
        sinks=case["sinks"],
        attn_logits_soft_cap=case["attn_logits_soft_cap"],
        scale=case["query"].shape[3] ** -0.5,
    )
    computed = legal_algorithms.compute(algorithm, problem)._asdict()
    return {
        tensor: array.astype(float) if tensor == "dsinks" else array.astype(float).swapaxes(0, 1)[None]
        for tensor, array in computed.items()
    }


def stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to dtype, as float64."""
    return array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32).astype(np.float64)


if __name__ == "__main__":
    main()
