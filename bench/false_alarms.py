"""How often the allowances accuse a correct implementation: fuzzed checks of right targets, and their findings.

    python bench/false_alarms.py [--examples N] [--seeds 1,2,...] [TARGET ...]

Runs the main job (`halocheck run`) on each target and seed, and adds up what its reports say: one check is one tensor
of one case under one of the checks, on two data draws. Every finding is printed with its replay line, to be looked at:
it is a false alarm or a fault of the target. Also printed: the largest share of the allowance by tensor.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

TARGETS = (
    "conformance.targets.bundled:halo",
    "conformance.targets.bundled:all_gather",
    "conformance.targets.jax_nn:dot_product_attention",
)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=TARGETS, help="targets that are right")
    parser.add_argument("--examples", type=int, default=600, help="cases for each target and seed")
    parser.add_argument("--seeds", default="1,2", help="seeds of the case list, comma-separated")
    arguments = parser.parse_args()
    checks = findings = 0
    for target in arguments.targets:
        for seed in arguments.seeds.split(","):
            done, accused = report_on(run(target, arguments.examples, int(seed)))
            checks, findings = checks + done, findings + accused
    print(f"{checks} checks, {findings} findings")
    sys.exit(1 if findings else 0)


def run(target: str, examples: int, seed: int) -> dict[str, Any]:
    """The report of one run of the main job."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--examples", str(examples), "--seed", str(seed), "--report", directory]
        halocheck = Path(sys.executable).with_name("halocheck")
        subprocess.run([halocheck, "run", target, *options], stdout=subprocess.DEVNULL, check=False)
        return json.loads((Path(directory) / "report.json").read_text())


def report_on(report: dict[str, Any]) -> tuple[int, int]:
    """Print one report's line, and return its counts of checks and of findings."""
    (target,) = report["targets"]
    largest: dict[str, float] = defaultdict(float)
    for cell in target["cells"]:
        if isinstance(cell["largest_share"], float):
            largest[cell["tensor"]] = max(largest[cell["tensor"]], cell["largest_share"])
    checks = sum(cell["cases"] for cell in target["cells"])
    shares = "  ".join(f"{tensor} {size:.3f}" for tensor, size in largest.items())
    print(f"{target['target']['name']:12} {checks:6} checks {len(target['findings'])} findings   {shares}", flush=True)
    for finding in target["findings"]:
        print(f"    {finding['replay']}", flush=True)
    return checks, len(target["findings"])


if __name__ == "__main__":
    main()
