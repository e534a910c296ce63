"""How often the allowances accuse a correct implementation: fuzzed checks of right targets, and their findings.

    python bench/false_alarms.py [--examples N] [--seeds 1,2,...] [TARGET ...]
    python bench/false_alarms.py --reports DIR ...

Runs the main job (`halocheck run`) on all targets for each seed, and adds up what its reports say: one check is one
tensor of one case under one of the checks, on two data draws. With --reports it adds up those of runs that were made
before. Every finding is printed with its replay line, to be looked at: it is a false alarm or a fault of the target.
Also printed: the largest share of the allowance by tensor.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TARGETS = (
    *(f"conformance.targets.bundled:{name}" for name in ("halo", "all_gather", "ring", "ulysses", "usp")),
    "conformance.targets.jax_nn:dot_product_attention",
)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=TARGETS, help="targets that are right")
    parser.add_argument("--examples", type=int, default=600, help="cases for each target and seed")
    parser.add_argument("--seeds", default="1,2", help="seeds of the case list, comma-separated")
    parser.add_argument("--reports", nargs="+", type=Path, help="directories that `halocheck run --report` wrote")
    arguments = parser.parse_args()
    if arguments.reports:
        reports = (json.loads((directory / "report.json").read_text()) for directory in arguments.reports)
    else:
        seeds = map(int, arguments.seeds.split(","))
        reports = (run(arguments.targets, arguments.examples, seed) for seed in seeds)
    checks = findings = 0
    for target in itertools.chain.from_iterable(report["targets"] for report in reports):
        done, accused = report_on(target)
        checks, findings = checks + done, findings + accused
    print(f"{checks} checks, {findings} findings")
    sys.exit(1 if findings else 0)


def run(targets: Sequence[str], examples: int, seed: int) -> dict[str, Any]:
    """The report of one run of the main job."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--examples", str(examples), "--seed", str(seed), "--report", directory]
        halocheck = Path(sys.executable).with_name("halocheck")
        subprocess.run([halocheck, "run", *targets, *options], stdout=subprocess.DEVNULL, check=False)
        return json.loads((Path(directory) / "report.json").read_text())


def report_on(target: dict[str, Any]) -> tuple[int, int]:
    """Print one target's line of a report, and return its counts of checks and of findings."""
    largest: dict[str, float] = defaultdict(float)
    for cell in target["cells"]:
        if isinstance(cell["largest_share"], float):
            largest[cell["tensor"]] = max(largest[cell["tensor"]], cell["largest_share"])
    checks = sum(cell["cases"] for cell in target["cells"])
    shares = "  ".join(f"{tensor} {size:.3f}" for tensor, size in largest.items())
    print(f"{target['target']['name']:17} {checks:6} checks {len(target['findings'])} findings   {shares}", flush=True)
    for finding in target["findings"]:
        print(f"    {finding['replay']}", flush=True)
    return checks, len(target["findings"])


if __name__ == "__main__":
    main()
