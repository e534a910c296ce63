"""A case whose chunks are long: a kernel walks several blocks there, and queries far from the border need not wait.

What is done only for long chunks (blocks, their offsets, an exchange behind other work) no small case reaches.
May touch: problem. Tests: tests/conformance/test_case_list.py.
"""

from __future__ import annotations

from conformance.problem import Case, Document, Problem

CHUNK_LEN = 1024
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
