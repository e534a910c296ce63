"""Cases whose chunks are long: a kernel walks several blocks there, and queries far from the border need not wait.

What is done only for long chunks (blocks, their offsets, an exchange behind other work) no small case reaches.
May touch: problem. Tests: tests/conformance/test_case_list.py.
"""

from __future__ import annotations

from conformance.problem import Case, Document, Problem

CHUNK_LEN = 1024
UNEVEN_CHUNK_LEN = 1000
"""No multiple of the rows of any kernel's block: the last one is padded."""
_RANKS = 2


def long_chunk_case(seed: int) -> Case:
    """One head and a window of less than half a chunk, so that it costs little; a document across the border."""
    problem = Problem(
        seq_len=_RANKS * CHUNK_LEN,
        num_query_heads=1,
        head_dim=8,
        sliding_window_size=400,
        context_parallelism=_RANKS,
        dtype="bfloat16",
        segments=True,
    )
    return Case(problem, ((Document(700, 1), Document(1348, 2)),), seed=seed)


def uneven_long_chunk_case(seed: int) -> Case:
    """What is added up over blocks, or padded to whole ones: sinks, two batch rows, two query heads a kv head.

    For the longer lists: kernels that pad nothing, and those without sinks, decline it.
    """
    problem = Problem(
        batch=2,
        seq_len=_RANKS * UNEVEN_CHUNK_LEN,
        num_query_heads=2,
        num_kv_heads=1,
        head_dim=8,
        sliding_window_size=300,
        context_parallelism=_RANKS,
        sinks=True,
    )
    return Case(problem, seed=seed)
