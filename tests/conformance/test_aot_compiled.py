"""With libtpu: every strategy and layout compiled for a TPU that is not there, and what the program would do.

Skipped, with the reason, where libtpu is not installed. Compiled, never executed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from conformance import cli
from conformance.aot.command import model_cases
from conformance.aot.job import Compiled, compile_target
from conformance.aot.topologies import GENERATIONS
from conformance.case_text import format_case, parse_case
from conformance.problem import LAYOUTS, Case

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install 'halocheck[aot]'"
)

_STRATEGIES = ("halo", "all_gather", "ring", "ulysses", "usp")
_DEFAULT = "v6e:2x4"


def _has_no_kernel(strategy: str, layout: str) -> bool:
    """The splash kernel takes keys in the order of positions only: there local attention is XLA's own."""
    return strategy in ("ring", "usp") and layout == "striped"


def _shape(strategy: str, layout: str) -> Case:
    """Eight ranks, a head_dim that fills the lanes, a window that spans a chunk border; usp has a 4 x 2 mesh.

    In stripes each key of a window lies on another rank: four of them. What no kernel blocks is small, else it compiles
    for long; halo's chunks are long enough that the contiguous ones have an interior, computed while the halo travels.
    """
    axes = "context_parallelism=4 ulysses_parallelism=2" if strategy == "usp" else "context_parallelism=8"
    seq_len = 8192 if strategy == "halo" else 512 if _has_no_kernel(strategy, layout) else 2048
    window = 4 if layout == "striped" else seq_len // 32
    return parse_case(
        f"v=1 seq_len={seq_len} num_query_heads=8 num_kv_heads=8 head_dim=128 sliding_window_size={window} "
        f"dtype=bfloat16 layout={layout} {axes} seed=1"
    )


def _compile(strategy: str, topology: str) -> dict[str, Compiled]:
    cases = [_shape(strategy, layout) for layout in LAYOUTS]
    done = compile_target(f"conformance.targets.bundled:{strategy}", topology, cases)
    return dict(zip(LAYOUTS, done, strict=True))


def _hold(strategy: str, compiled: dict[str, Compiled]) -> None:
    """What is asked of every strategy and layout."""
    for layout, one in compiled.items():
        assert one.findings == (), f"{strategy}, {layout}: compiles, and sends what its plan has"
        if (strategy, layout) == ("halo", "striped"):
            assert "halo needs chunks" in one.reason, "the one that is declined, and why"
            continue
        assert one.reason == "", f"{strategy}, {layout} is not declined"
        kernels = sum(one.facts["kernels"].values())
        if _has_no_kernel(strategy, layout):
            assert kernels == 0, f"{strategy}, {layout}: XLA's own"
        else:
            assert kernels >= 2, f"{strategy}, {layout}: Pallas kernels stand in the program, there and back"
        assert {transfer["kind"] for transfer in one.facts["transfers"]}, f"{strategy}, {layout}: it sends something"
        assert max(one.shares.values()) <= 1, f"{strategy}, {layout}: no more than its plan"
        hidden, transfers = one.hidden
        if (strategy, layout) == ("halo", "contiguous"):
            assert hidden == transfers == 4, "keys and values, there and back: a kernel runs while each travels"


@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_every_strategy_and_layout_compiles_for_v6e_within_its_plan(strategy: str) -> None:
    _hold(strategy, _compile(strategy, _DEFAULT))


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology", [one.default_topology for one in GENERATIONS.values() if one.default_topology != _DEFAULT]
)
@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_every_strategy_and_layout_compiles_for_the_other_generations(strategy: str, topology: str) -> None:
    _hold(strategy, _compile(strategy, topology))


@pytest.mark.slow
def test_the_report_has_transfers_hidden_kernels_scheduled_and_runs_under_remat(tmp_path: Path) -> None:
    arguments = ["conformance.targets.bundled:halo", "--models", "gemma-3-27b", "--layouts", "contiguous"]
    ran = subprocess.run(
        [sys.executable, "-m", "conformance.cli", "aot", *arguments, "--report", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, ""), "within its plan, and no word of libtpu's reaches the terminal"
    (one,) = json.loads((tmp_path / "aot.json").read_text())
    assert (one["hidden_transfers"], one["transfers"]) == (4, 4), "keys and values, there and back"
    assert one["shares_of_plan"] == {"forward": 1.0, "backward": 1.0}, "exactly the window's rows"
    assert one["case"] == format_case(model_cases(("gemma-3-27b",), ("local",), ("contiguous",))[0])
    schedules = one["facts"]["schedules"]
    assert schedules, "libtpu wrote the schedules of the kernels"
    for name, schedule in schedules.items():
        assert 0 < schedule["hot"] < schedule["program"], f"{name}: a stretch of the program"
        assert 0 < schedule["matrix_units"] <= 1, f"{name}: the hot region is where the matrix products are"
    runs = one["facts"]["runs"]
    forwards = {name: sum(n for kernel, n in counts.items() if "forward" in kernel) for name, counts in runs.items()}
    assert forwards["plain"] >= 1, f"our own kernels: {runs}"
    assert forwards["nothing saved"] == 2 * forwards["plain"], "the forward runs twice"
    assert forwards["names saved"] == forwards["plain"], "and once where its residuals are saved"


@pytest.mark.slow
def test_as_a_check_of_a_run_it_conforms() -> None:
    case = format_case(_shape("halo", "contiguous"))
    assert cli.main(["replay", case, "conformance.targets.bundled:halo", "--checks", "aot"]) == 0, "compiled and judged"
