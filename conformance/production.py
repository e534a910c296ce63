"""Production shapes: published models' layers at 128K to 1M tokens, on the meshes that a machine's devices fold into.

What `--profile nightly` runs on real TPUs and what `halocheck aot --models nightly` compiles for absent ones.
May touch: models, problem. Tests: tests/conformance/test_production.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance.models import MODELS, RANKS, Model, full_size_case
from conformance.problem import Case, Document

# Sequences longer than 128K, and which model's local layer has them in which layout.
_LONG = (
    ("gemma-3-27b", 256 * 1024, "dual_chunk_swap"),
    ("gemma-4-26b-a4b", 512 * 1024, "contiguous"),
    ("gemma-4-26b-a4b", 1024 * 1024, "dual_chunk_swap"),
    ("gpt-oss-20b", 1024 * 1024, "contiguous"),
)
_FOLDED = "gemma-4-26b-a4b"
_GLOBAL = ("gemma-4-26b-a4b", "gpt-oss-20b")
_LAYOUTS = ("contiguous", "dual_chunk_swap")


def production_cases(num_devices: int, seed: int = 0) -> tuple[Case, ...]:
    """The production cases for a machine of so many devices; on fewer than 8 the long ones do not fit, and decline.

    Every model's local layer at 128K tokens, one of them on every folding, GLOBAL layers, and sequences up to 1M.
    bfloat16; half of them are packed: their sequence holds four documents. Only the data follow from `seed`.
    """
    cases = list(_cases(num_devices))
    packed = [_packed(case) if index % 4 in (1, 2) else case for index, case in enumerate(cases)]
    # Odd, so that a program holds `attention` alone (target.calls_of): twice 1M tokens would fit nowhere.
    return tuple(case.replace(seed=(2 * (seed * len(cases) + index) + 1) % 2**32) for index, case in enumerate(packed))


def foldings(num_devices: int) -> tuple[tuple[int, int, int], ...]:
    """(data, context, tensor) of every mesh of all devices with two ranks or more along context.

    Of a number that is no power of two the largest one below it is folded: heads and chunks divide by nothing else.
    """
    size = 1 << (num_devices.bit_length() - 1)
    powers = [1 << exponent for exponent in range(size.bit_length())]
    return tuple(
        (data, size // (data * tensor), tensor)
        for data in powers
        for tensor in powers
        if size == 1 or data * tensor <= size // 2
    )


def _cases(num_devices: int) -> Iterator[Case]:
    by_name = {model.name: model for model in MODELS}
    _, ranks, _ = foldings(num_devices)[0]
    for index, model in enumerate(MODELS):
        yield _layer(model, "local", _LAYOUTS[index % 2], ranks)
    for index, (data, context, tensor) in enumerate(foldings(num_devices)[1:]):
        folded = _layer(by_name[_FOLDED], "local", _LAYOUTS[index % 2], context)
        if folded.problem.num_query_heads % tensor == 0:
            yield folded.replace(batch=data, data_parallelism=data, tensor_parallelism=tensor)
    for name in _GLOBAL:
        yield _layer(by_name[name], "global", "dual_chunk_swap", ranks)
    for name, seq_len, layout in _LONG:
        yield _layer(by_name[name], "local", layout, max(ranks, RANKS)).replace(seq_len=seq_len)


def _layer(model: Model, layer: str, layout: str, ranks: int) -> Case:
    return full_size_case(model, layer, layout).replace(context_parallelism=ranks)


def _packed(case: Case) -> Case:
    """The case with four documents a row, none of which ends on a chunk border; one is shorter than most windows."""
    seq_len = case.problem.seq_len
    lengths = (seq_len // 3 + 77, 100, seq_len // 2 - 9)
    row = tuple(Document(length) for length in (*lengths, seq_len - sum(lengths)))
    return case.replace(segments=True, documents=(row,) * case.problem.batch)
