"""Published models with sliding-window layers: their real shapes as data, and cases made of them, scaled or full size.

Also the eight cases of MaxText pull request 5608's own halo test. May touch: problem.
Tests: tests/conformance/test_models.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from conformance.problem import Case, Document, Problem

LAYERS = ("local", "global")
RANKS = 8
FULL_SEQ_LEN = 128 * 1024
SCALED_SEQ_LEN = 256
# A window below this would be a halo of one row or none, which other cases test; the model's own is never so small.
SMALLEST_SCALED_WINDOW = 4


@dataclass(frozen=True)
class Heads:
    """Head counts and size of one kind of layer."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Model:
    """One published model. `context` is its length in tokens; `global_heads` None: the model has no GLOBAL layer.

    `source` names the files that the values were read from; MaxText's are relative to its src/maxtext/.
    """

    name: str
    local_heads: Heads
    global_heads: Heads | None
    sliding_window_size: int
    local_layers_per_global: int | None
    context: int
    source: str
    attn_logits_soft_cap: float | None = None
    scale: float | None = None
    sinks: bool = False


def _gemma_2(size: str, heads: Heads, scale: float | None, source: str) -> Model:
    return Model(f"gemma-2-{size}", heads, heads, 4096, 1, 8 * 1024, source, attn_logits_soft_cap=50.0, scale=scale)


def _gemma_3(size: str, heads: Heads, scale: float | None) -> Model:
    source = f"configs/models/gemma3-{size}.yml; scale: models/gemma3.py; pattern, context: google/gemma-3-{size}-pt"
    return Model(f"gemma-3-{size}", heads, heads, 1024, 5, 128 * 1024, source, scale=scale)


# 4608 // 32 and 5376 // 32 (embedding over query heads) stand in place of head_dim in the two 27B models' scale.
MODELS: tuple[Model, ...] = (
    _gemma_2("2b", Heads(8, 4, 256), None, "configs/models/gemma2-2b.yml; context: google/gemma-2-2b"),
    _gemma_2("9b", Heads(16, 8, 256), None, "configs/models/gemma2-9b.yml; context: google/gemma-2-9b"),
    _gemma_2(
        "27b",
        Heads(32, 16, 128),
        144**-0.5,
        "configs/models/gemma2-27b.yml; scale: transformers models/gemma2/convert_gemma2_weights_to_hf.py",
    ),
    _gemma_3("4b", Heads(8, 4, 256), None),
    _gemma_3("12b", Heads(16, 8, 256), None),
    _gemma_3("27b", Heads(32, 16, 128), 168**-0.5),
    Model(
        "gemma-4-26b-a4b",
        Heads(16, 8, 256),
        Heads(16, 2, 512),
        1024,
        5,
        256 * 1024,
        "configs/models/gemma4-26b.yml; scale and pattern: models/gemma4.py; context: from memory",
        scale=1.0,
    ),
    Model(
        "gemma-4-31b",
        Heads(32, 16, 256),
        Heads(32, 4, 512),
        1024,
        5,
        256 * 1024,
        "configs/models/gemma4-31b.yml; scale and pattern: models/gemma4.py; context: from memory",
        scale=1.0,
    ),
    Model(
        "gemma-4-e2b",
        Heads(8, 1, 256),
        Heads(8, 1, 512),
        512,
        4,
        128 * 1024,
        "configs/models/gemma4-e2b.yml; scale and pattern: models/gemma4_small.py; context: from memory",
        scale=1.0,
    ),
    Model(
        "gemma-4-e4b",
        Heads(8, 2, 256),
        Heads(8, 2, 512),
        512,
        5,
        128 * 1024,
        "configs/models/gemma4-e4b.yml; scale and pattern: models/gemma4_small.py; context: from memory",
        scale=1.0,
    ),
    Model(
        "gpt-oss-20b",
        Heads(64, 8, 64),
        Heads(64, 8, 64),
        128,
        1,
        128 * 1024,
        "configs/models/gpt-oss-20b.yml (gpt-oss-120b.yml has the same attention)",
        sinks=True,
    ),
    Model(
        "mistral-7b-v0.1",
        Heads(32, 8, 128),
        None,
        4096,
        None,
        32 * 1024,
        "configs/models/mistral-7b.yml; window, context: mistralai/Mistral-7B-v0.1 config.json",
    ),
    Model(
        "olmo-3-7b",
        Heads(32, 32, 128),
        Heads(32, 32, 128),
        4096,
        3,
        64 * 1024,
        "configs/models/olmo3-7b.yml",
    ),
    Model(
        "olmo-3-32b",
        Heads(40, 8, 128),
        Heads(40, 8, 128),
        4096,
        3,
        64 * 1024,
        "configs/models/olmo3-32b.yml",
    ),
)


def model_cases(seed: int) -> tuple[Case, ...]:
    """Scaled cases: every model's local layer, in the two layouts by turns, and each different GLOBAL layer."""
    cases = []
    seen_global = set()
    for index, model in enumerate(MODELS):
        layout = ("dual_chunk_swap", "contiguous")[index % 2]
        cases.append(scaled_case(model, "local", layout, seed + len(cases)))
        if model.global_heads is None:
            continue
        whole = scaled_case(model, "global", layout, 0).replace(layout="contiguous").problem
        if whole not in seen_global:
            seen_global.add(whole)
            cases.append(scaled_case(model, "global", layout, seed + len(cases)))
    return tuple(cases)


def scaled_case(model: Model, layer: str, layout: str = "dual_chunk_swap", seed: int = 0) -> Case:
    """A layer of the model at 256 tokens over 8 ranks, keeping its ratios of query to kv heads and of W to the chunk.

    head_dim is an eighth; the scale is the model's own. The chunk that W is compared to is that of 128K tokens, or of
    the model's context where that is shorter. bfloat16, two documents.
    """
    heads = _heads(model, layer)
    # Two kv heads where the model has an even number of them, else one: the ratio to query heads stays.
    divisor = heads.num_kv_heads // 2 if heads.num_kv_heads % 2 == 0 else heads.num_kv_heads
    context = min(model.context, FULL_SEQ_LEN)
    window = max(SMALLEST_SCALED_WINDOW, model.sliding_window_size * SCALED_SEQ_LEN // context)
    small = Heads(heads.num_query_heads // divisor, heads.num_kv_heads // divisor, heads.head_dim // 8)
    problem = _problem(model, layer, small, layout, SCALED_SEQ_LEN).replace(
        sliding_window_size=window if layer == "local" else None, segments=True
    )
    # Off the chunk borders, in the middle third.
    first = SCALED_SEQ_LEN // 3 + 16
    return Case(problem, ((Document(first), Document(SCALED_SEQ_LEN - first)),), seed=seed)


def full_size_case(model: Model, layer: str, layout: str = "dual_chunk_swap", seed: int = 0) -> Case:
    """A layer of the model as published, at 128K tokens over 8 ranks, whatever its own context; bfloat16."""
    return Case(_problem(model, layer, _heads(model, layer), layout, FULL_SEQ_LEN), seed=seed)


def _heads(model: Model, layer: str) -> Heads:
    heads = {"local": model.local_heads, "global": model.global_heads}.get(layer)
    if heads is None:
        rule = "local" if model.global_heads is None else "local or global"
        raise ValueError(f"layer must be {rule} for {model.name}, got {layer!r}")
    return heads


def _problem(model: Model, layer: str, heads: Heads, layout: str, seq_len: int) -> Problem:
    return Problem(
        seq_len=seq_len,
        num_query_heads=heads.num_query_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        sliding_window_size=model.sliding_window_size if layer == "local" else None,
        layout=layout,
        context_parallelism=RANKS,
        dtype="bfloat16",
        attn_logits_soft_cap=model.attn_logits_soft_cap,
        scale=model.scale,
        sinks=model.sinks,
    )


def pull_request_5608_cases(seed: int) -> tuple[Case, ...]:
    """The eight cases of the halo test of AI-Hypercomputer/maxtext/pull/5608.

    2 ranks beside a data axis of 4, or 4 beside 2; both layouts; one document, or 300 + 400 + 324 tokens.
    """
    cases = []
    for ranks, data_parallelism in ((2, 4), (4, 2)):
        for layout in ("contiguous", "dual_chunk_swap"):
            for lengths in ((1024,), (300, 400, 324)):
                problem = Problem(
                    batch=4,
                    seq_len=1024,
                    num_query_heads=4,
                    num_kv_heads=2,
                    head_dim=64,
                    sliding_window_size=128,
                    layout=layout,
                    context_parallelism=ranks,
                    data_parallelism=data_parallelism,
                    scale=1.0,
                    segments=True,
                )
                row = tuple(Document(length, index) for index, length in enumerate(lengths, start=1))
                cases.append(Case(problem, (row,) * problem.batch, seed=seed + len(cases)))
    return tuple(cases)
