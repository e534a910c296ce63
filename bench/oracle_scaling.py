"""Time and peak memory of the oracles against the length of the sequence, beside plain JAX on the same machine.

    python bench/oracle_scaling.py            forward, VJP and allowances of dense, banded and jax.nn (float64)
    python bench/oracle_scaling.py --million  the probe of S = 1,048,576, W = 1024, 8 kv heads, head_dim 128
    python bench/oracle_scaling.py --sinks    dsinks of one of its heads, W = 128: 2^27 pairs, all that are affordable

Each line is measured in a process of its own, so that its peak memory is its own: the largest resident set, less what
the process held before the arrays were made. Time is of the wall clock, with the processor time beside it.
"""

import argparse
import dataclasses
import multiprocessing
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import oracle
from oracle.budget import Precision

HEADS, HEAD_DIM, WINDOW = 2, 64, 128
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
LONGEST_DENSE = 8192
MILLION = oracle.outline.Outline(1, 2**20, 16, 8, 128, window=(1023, 0))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", action="store_true", help="the probe of a million tokens instead")
    parser.add_argument("--sinks", action="store_true", help="dsinks of one head of a million tokens instead")
    arguments = parser.parse_args()
    if arguments.sinks:
        for dtype in ("float32", "bfloat16"):
            report(f"dsinks of one head, {dtype}", 2**20, sinks_of_a_million, dtype)
        return
    if arguments.million:
        for dtype in ("float32", "bfloat16"):
            report(f"probe, default places, {dtype}", 2**20, probe_million, dtype)
        return
    for seq_len in LENGTHS:
        if seq_len <= LONGEST_DENSE:
            report("dense, forward and VJP", seq_len, dense, seq_len)
            report("jax.nn float64, forward and VJP", seq_len, jax_nn, seq_len)
        report("banded, forward and VJP", seq_len, banded, seq_len)
        report("budget, answer and allowances", seq_len, budget, seq_len)


def report(name: str, seq_len: int, job: Callable[[Any], str], argument: Any) -> None:
    """Run a job in a fresh process and print its line."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        wall, processor, mebibytes, remark = pool.apply(measured, (job, argument))
    times = f"{wall:8.2f} s {processor:8.2f} s of processor"
    print(f"{name:34} S = {seq_len:<8} {times} {mebibytes:8.0f} MiB  {remark}", flush=True)


def measured(job: Callable[[Any], str], argument: Any) -> tuple[float, float, float, str]:
    """Seconds of wall clock and of processor, peak MiB, and the job's remark."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, processor = time.perf_counter(), time.process_time()
    remark = job(argument)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return wall, processor, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, remark


def arrays(seq_len: int) -> dict[str, Any]:
    """query, key, value, dout."""
    random = np.random.default_rng(0)
    return {name: random.normal(size=(1, seq_len, HEADS, HEAD_DIM)) for name in ("query", "key", "value", "dout")}


def dense(seq_len: int) -> str:
    """The trust anchor."""
    oracle.attention_vjp(**arrays(seq_len), window=(WINDOW - 1, 0))
    return ""


def banded(seq_len: int) -> str:
    """The same by tiles."""
    oracle.banded.attention_vjp(**arrays(seq_len), window=(WINDOW - 1, 0))
    return ""


def budget(seq_len: int) -> str:
    """Answer and allowances for bfloat16."""
    oracle.budget.answer_with_allowances(**arrays(seq_len), window=(WINDOW - 1, 0), precision=Precision("bfloat16"))
    return ""


def jax_nn(seq_len: int) -> str:
    """jax.nn.dot_product_attention, float64, compiled; the compilation is in the time."""
    import jax

    jax.config.update("jax_enable_x64", True)
    given = arrays(seq_len)

    def attention(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, local_window_size=(WINDOW - 1, 0))

    @jax.jit
    def with_vjp(query: Any, key: Any, value: Any, dout: Any) -> Any:
        out, vjp = jax.vjp(attention, query, key, value)
        return out, vjp(dout)

    jax.block_until_ready(with_vjp(**given))
    return ""


def probe_million(dtype: str) -> str:
    """Every default place of a case whose arrays would take 24 GiB in float64; they are never formed."""
    places = oracle.places.default_places(MILLION, chunk=2**16, seed=0)
    kinds = {"query": 0, "key": 0}
    for place, _, _ in oracle.probe.probe(random_rows, MILLION, places, precision=Precision(dtype)):
        kinds[place.side] += 1
    return f"{kinds['query']} query places, {kinds['key']} key places"


def sinks_of_a_million(dtype: str) -> str:
    """The sum over every query of a head, and its allowance."""
    outline = dataclasses.replace(MILLION, window=(127, 0), sinks=np.zeros(MILLION.num_query_heads))
    queries, precision = oracle.sinks.every_query(outline), Precision(dtype)
    sums = oracle.sinks.sink_sums(random_rows, outline, 5, queries, precision=precision)
    expected, allowed = oracle.sinks.dsink_with_allowance(sums, outline, precision=precision)
    return f"{expected:.6g}, allowance {allowed:.2g}"


def random_rows(tensor: str, batch_row: int, positions: np.ndarray, heads: slice) -> np.ndarray:
    """Rows that depend on (tensor, batch row, head, position) alone: one Philox stream for each head."""
    dim = 4 if tensor == "dlse" else MILLION.head_dim  # a Philox step makes four numbers
    out = np.empty((len(positions), heads.stop - heads.start, dim))
    runs = np.split(np.arange(len(positions)), np.nonzero(np.diff(positions) != 1)[0] + 1)
    for index, head in enumerate(range(heads.start, heads.stop)):
        for run in runs:
            key = [sum(map(ord, tensor)), batch_row * 1000 + head]
            stream = np.random.Philox(key=key).advance(int(positions[run[0]]) * dim // 4)
            uniform = np.random.Generator(stream).random((len(run), dim))
            out[run, index] = (uniform - 0.5) * np.sqrt(12.0)
    return out[..., 0] if tensor == "dlse" else out


if __name__ == "__main__":
    main()
