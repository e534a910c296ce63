"""How much of its allowance each legal NumPy algorithm needs: the measurement that chose the budget's constants.

    python bench/calibrate_budget.py [--seeds N] [--kinds plain,peaked,...] [--dtypes float32,bfloat16]

Prints, for each dtype and kind of values, the largest share by tensor over the zoo of legal_algorithms.py, windows,
caps and the calibration seeds 0 ... N-1; then the members that came closest. A share above 1 would be a false alarm.
"""

import argparse
import itertools
from collections.abc import Iterable

import legal_algorithms
from oracle_cases import KINDS, TENSORS, Shape, declared, draw, is_structured, shares

from oracle.budget import answer_with_allowances

SHAPES = tuple(
    Shape(window=window, attn_logits_soft_cap=cap)
    for window, cap in itertools.product([(0, 0), (5, 0), (40, 0), (None, 0), (7, 7)], [None, 5.0])
)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="calibration seeds for each kind, window and cap")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of values, comma-separated")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="dtypes, comma-separated")
    arguments = parser.parse_args()
    dtypes: list[str] = arguments.dtypes.split(",")
    kinds: list[str] = arguments.kinds.split(",")
    print(f"{'dtype':9} {'values':11} " + " ".join(f"{tensor:>7}" for tensor in TENSORS))
    closest: list[tuple[float, str]] = []
    for dtype, kind in itertools.product(dtypes, kinds):
        members = [member for member in legal_algorithms.declared_zoo() if member.dtype == dtype]
        for name, zoo in (("", list(legal_algorithms.zoo(dtype))), ("declared", members)):
            largest, members_at = measure(dtype, kind, zoo, arguments.seeds)
            print(f"{dtype:9} {kind:11} " + " ".join(f"{largest[t]:7.3f}" for t in TENSORS) + f" {name}", flush=True)
            closest += [(largest[tensor], f"{tensor:7} {kind:11} {members_at[tensor]}") for tensor in TENSORS]
    for size, text in sorted(closest, reverse=True)[:12]:
        print(f"{size:.3f} {text}")


def measure(
    dtype: str, kind: str, zoo: Iterable[legal_algorithms.Algorithm], seeds: int
) -> tuple[dict[str, float], dict[str, str]]:
    """The largest share by tensor, and the algorithm that needed it."""
    largest: dict[str, float] = dict.fromkeys(TENSORS, 0.0)
    members: dict[str, str] = dict.fromkeys(TENSORS, "")
    for shape, seed in itertools.product(SHAPES, range(seeds)):
        case = draw(kind, seed, dtype, shape)
        answers = {}
        for algorithm in zoo:
            precision = declared(algorithm)
            if precision not in answers:
                answers[precision] = answer_with_allowances(
                    **case, precision=precision, structured_values=is_structured(kind)
                )
            for tensor, size in shares(algorithm, case, *answers[precision]).items():
                if size > largest[tensor]:
                    largest[tensor], members[tensor] = size, f"{shape} {algorithm}"
    return largest, members


if __name__ == "__main__":
    main()
