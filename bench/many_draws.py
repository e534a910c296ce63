"""False alarms on much data: each program of a right target is run on many data draws, where `halocheck run` makes two.

    python bench/many_draws.py [--draws 20] [--cases 100] [--seed 1] [TARGET ...]

Cases are those that follow the case list of the seed, float32 and bfloat16, of at most 256 rows. One check is, as in
false_alarms.py, one tensor of one case under output, residuals or gradients, on two data draws: N draws are N/2 checks
of each. In this process, without a worker: the targets are known to be well behaved.
"""

import argparse
import functools
import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Iterator

from conformance.devices import DEFAULT_DEVICES, worker_environment

os.environ.update(worker_environment(DEFAULT_DEVICES, enable_x64=False))

import jax  # after its environment

from conformance import answers, execution
from conformance import evidence as evidence_module
from conformance.case_list import further_case
from conformance.case_text import format_case
from conformance.checks import CHECKS
from conformance.problem import Case
from conformance.target import Target, load_target

TARGETS = tuple(
    f"conformance.targets.bundled:{name}"
    for name in ("halo", "all_gather", "ring", "ulysses", "usp", "halo_splash", "all_gather_splash", "ring_splash")
)
MANY_ROWS = 256


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=TARGETS, help="targets that are right")
    parser.add_argument("--draws", type=int, default=20, help="data draws of each program")
    parser.add_argument("--cases", type=int, default=100, help="cases, of which each target takes those it supports")
    parser.add_argument("--seed", type=int, default=1, help="seed of the case list")
    arguments = parser.parse_args()
    execution.NUM_DRAWS = evidence_module.NUM_DRAWS = arguments.draws
    # Three checks and several targets ask for the same answers: two calls on each draw.
    answers._answer = functools.lru_cache(maxsize=8 * arguments.draws)(answers._answer.__wrapped__)
    checks = findings = 0
    largest: dict[tuple[str, str], float] = defaultdict(float)
    targets = [load_target(spec) for spec in arguments.targets]
    for case, target in itertools.product(cases(arguments.seed, arguments.cases), targets):
        if target.supports(case.problem) is not None:
            continue
        _, arrays = execution.execute(target, case, lambda phase: None)
        shares, accused = judged(target, case, arrays)
        checks, findings = checks + len(shares) * arguments.draws // 2, findings + len(accused)
        for tensor, share in shares.items():
            key = (target.description.name, tensor)
            largest[key] = max(largest[key], share)
        for reading in accused:
            print(f"    {target.description.name} {format_case(case)}\n        {reading}", flush=True)
        print(f"{checks} checks, {findings} findings", flush=True)
        jax.clear_caches()
    for name, of_target in itertools.groupby(sorted(largest), key=lambda key: key[0]):
        print(f"{name:17} " + "  ".join(f"{tensor} {largest[name, tensor]:.3f}" for _, tensor in of_target))
    sys.exit(1 if findings else 0)


def cases(seed: int, count: int) -> Iterator[Case]:
    """Cases that follow the list of `seed`, with few rows, in float32 and bfloat16."""
    following = (further_case(seed, index, DEFAULT_DEVICES.count) for index in itertools.count(10_000))
    small = (case for case in following if case.problem.batch * case.problem.seq_len <= MANY_ROWS)
    yield from itertools.islice((case for case in small if case.problem.dtype != "float64"), count)


def judged(target: Target, case: Case, arrays: dict) -> tuple[dict[str, float], list[str]]:
    """The largest share by tensor, and what each finding says."""
    evidence = evidence_module.Evidence(target.description, case, {}, arrays)
    outcomes = [CHECKS[name].run(evidence) for name in ("output", "residuals", "gradients")]
    shares = {tensor: share for outcome in outcomes for tensor, share in outcome.shares.items()}
    return shares, [finding.reading for outcome in outcomes for finding in outcome.findings]


if __name__ == "__main__":
    main()
