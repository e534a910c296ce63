"""The feature space: what varies from case to case, as data, declared once for covering lists and hypothesis alike.

Geometry is named by what it means (a window of C + 1, a document that ends on a chunk border), never by sizes.
What a case really exercises is said by events.py. May touch: problem, philox, document_levels.
Tests: tests/conformance/test_space.py.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from conformance.document_levels import DOCUMENTS, PADDINGS, Stretch, padded
from conformance.philox import Draws
from conformance.problem import AXIS_TYPES, LAYOUTS, VALUE_KINDS, Case, Document, Problem, Window
from conformance.value_kinds import STREAMS

Row = Mapping[str, str]
Choice = tuple[str, str]


@dataclass(frozen=True)
class Feature:
    """One thing that varies: `levels` maps the name of each value it takes to what the name means."""

    name: str
    levels: Mapping[str, Any]


WindowRule = Callable[[int, int], "int | Window | None"]

# From (chunk length C, sequence length S) to a sliding_window_size, a pair (left, right), or None for a GLOBAL layer.
WINDOWS: dict[str, WindowRule] = {
    "1": lambda chunk, seq: 1,
    "2": lambda chunk, seq: 2,
    "C-1": lambda chunk, seq: max(1, chunk - 1),
    "C": lambda chunk, seq: chunk,
    "C+1": lambda chunk, seq: chunk + 1,
    "2C-1": lambda chunk, seq: 2 * chunk - 1,
    "2C+1": lambda chunk, seq: 2 * chunk + 1,
    # A third hop for one row, and for all but one: under dual_chunk_swap it may come back to the rank it started from.
    "2C+2": lambda chunk, seq: 2 * chunk + 2,
    "3C": lambda chunk, seq: 3 * chunk,
    "S-1": lambda chunk, seq: max(1, seq - 1),
    "S": lambda chunk, seq: seq,
    "S+1": lambda chunk, seq: seq + 1,
    "two_sided_small": lambda chunk, seq: (2, 1),
    "two_sided_beyond_chunk": lambda chunk, seq: (chunk + 2, chunk + 1),
    "right_only": lambda chunk, seq: (0, 3),
    "left_and_whole_future": lambda chunk, seq: (2, None),
    "global": lambda chunk, seq: None,
}

FEATURES = (
    Feature("layout", {name: name for name in LAYOUTS}),
    Feature("ranks", {str(ranks): ranks for ranks in (1, 2, 3, 4, 5, 8)}),
    # Sizes of the axes data, tensor and ulysses.
    Feature(
        "mesh",
        {
            "1x1": (1, 1, 1),
            "2x1": (2, 1, 1),
            "1x2": (1, 2, 1),
            "2x2": (2, 2, 1),
            "3x1": (3, 1, 1),
            "1x3": (1, 3, 1),
            "1x1x2": (1, 1, 2),
            "1x2x2": (1, 2, 2),
        },
    ),
    Feature("mesh_axes", {",".join(axes): axes for axes in itertools.permutations(("data", "context", "tensor"))}),
    Feature("axis_types", {name: name for name in AXIS_TYPES}),
    Feature("device_order", {name: name for name in ("natural", "reversed")}),
    Feature("chunk_len", {str(length): length for length in (1, 4, 7, 8, 12, 16)}),
    Feature("window", WINDOWS),
    Feature("rows_per_shard", {"1": 1, "2": 2}),
    Feature("heads", {f"{q}/{kv}": (q, kv) for q, kv in ((1, 1), (4, 1), (4, 2), (6, 2), (6, 3), (3, 3))}),
    Feature(
        "dims",
        {
            "8/8": (8, 8, False),
            "16/8": (16, 8, False),
            "4/12": (4, 12, False),
            "5/5": (5, 5, False),
            "64/64": (64, 64, False),
            "96/96": (96, 96, False),
            "128/128": (128, 128, False),
            "256/128": (256, 128, False),
            "shared": (8, 8, True),
        },
    ),
    Feature("dtype", {"float32": "float32", "bfloat16": "bfloat16"}),
    Feature("cap", {"none": None, "5": 5.0, "50": 50.0}),
    Feature("scale", {"none": None, "1": 1.0, "0.05": 0.05}),
    Feature("sinks", {"no": False, "yes": True}),
    Feature("documents", DOCUMENTS),
    Feature("padding", PADDINGS),
    Feature("values", {name: name for name in VALUE_KINDS}),
)


DRAWN_ALONE: Mapping[str, Mapping[str, Any]] = {
    "rows_per_shard": {"3": 3},
    "device_order": {"rotated": "rotated"},
}
"""By feature, levels that hypothesis draws and no list of cases has: those lists are frozen, and stay as they are."""


@functools.cache
def features_for(num_devices: int) -> tuple[Feature, ...]:
    """FEATURES without the levels that need more than `num_devices` by themselves."""

    def fits(feature: Feature, level: str) -> bool:
        meaning = feature.levels[level]
        needed = {"ranks": lambda: meaning, "mesh": lambda: math.prod(meaning)}.get(feature.name, lambda: 1)()
        return needed <= num_devices

    return tuple(
        Feature(feature.name, {level: meaning for level, meaning in feature.levels.items() if fits(feature, level)})
        for feature in FEATURES
    )


@functools.cache
def forbidden_pairs(num_devices: int) -> frozenset[frozenset[Choice]]:
    """Pairs of (feature, level) that no case may hold together, on a mesh of at most `num_devices`.

    Every choice can be completed: with one rank, a 1x1 mesh, 4/2 heads (6/2 beside three tensor shards), no padding,
    plain values.
    """
    levels = {feature.name: feature.levels for feature in FEATURES}
    pairs = [
        (("ranks", ranks), ("mesh", mesh))
        for ranks, mesh in itertools.product(levels["ranks"], levels["mesh"])
        if int(ranks) * math.prod(levels["mesh"][mesh]) > num_devices
    ]
    pairs += [
        (("mesh", mesh), ("heads", heads))
        for mesh, heads in itertools.product(levels["mesh"], levels["heads"])
        if levels["heads"][heads][0] % (levels["mesh"][mesh][1] * levels["mesh"][mesh][2])
    ]
    # Padding is a segment id, so there is none where there are no segment ids.
    pairs += [(("documents", "none"), ("padding", padding)) for padding in levels["padding"] if padding != "none"]
    # A value that is the key itself cannot be coded.
    pairs += [(("dims", "shared"), ("values", "rank_coded"))]
    return frozenset(frozenset(pair) for pair in pairs)


def is_allowed(row: Row, forbidden: frozenset[frozenset[Choice]]) -> bool:
    """Whether no two choices of the row are a forbidden pair."""
    return not any(frozenset(pair) in forbidden for pair in itertools.combinations(row.items(), 2))


def case_of(row: Row, seed: int) -> Case:
    """The case of a row; what its levels leave open (which border, how much padding) follows from the seed."""
    level = {of.name: {**of.levels, **DRAWN_ALONE.get(of.name, {})}[row[of.name]] for of in FEATURES}
    data_parallelism, tensor_parallelism, ulysses_parallelism = level["mesh"]
    # The ulysses axis cuts a rank's rows evenly; two odd chunks a rank are even together.
    pieces = ulysses_parallelism if level["layout"] != "dual_chunk_swap" else 1
    ranks, chunk_len = level["ranks"], math.ceil(level["chunk_len"] / pieces) * pieces
    seq_len = chunk_len * ranks * (2 if level["layout"] == "dual_chunk_swap" else 1)
    size_or_window = level["window"](chunk_len, seq_len)
    num_query_heads, num_kv_heads = level["heads"]
    head_dim, value_dim, shared_kv = level["dims"]
    problem = Problem(
        batch=data_parallelism * level["rows_per_shard"],
        seq_len=seq_len,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        sliding_window_size=size_or_window if isinstance(size_or_window, int) else None,
        window=size_or_window if isinstance(size_or_window, tuple) else None,  # type: ignore[arg-type]  # None: derived
        layout=level["layout"],
        context_parallelism=ranks,
        ulysses_parallelism=ulysses_parallelism,
        data_parallelism=data_parallelism,
        tensor_parallelism=tensor_parallelism,
        mesh_axes=level["mesh_axes"],
        axis_types=level["axis_types"],
        device_order=level["device_order"],
        dtype=level["dtype"],
        attn_logits_soft_cap=level["cap"],
        scale=level["scale"],
        sinks=level["sinks"],
        segments=level["documents"] is not None,
        padding=None if level["padding"] is None else level["padding"].segment_id,
        shared_kv=shared_kv,
    )
    return Case(problem, _documents(problem, level, seed), values=level["values"], seed=seed)


def _documents(problem: Problem, level: Mapping[str, Any], seed: int) -> tuple[tuple[Document, ...], ...] | None:
    if level["documents"] is None:
        return None
    rows = []
    for batch_row in range(problem.batch):
        stretch = Stretch(problem.seq_len, problem.chunk_len, Draws(seed, STREAMS["documents"], batch_row))
        documents = level["documents"](stretch)
        rows.append(documents if level["padding"] is None else padded(documents, level["padding"], stretch))
    return tuple(rows)
