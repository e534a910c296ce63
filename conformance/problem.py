"""The problem (all that a target is told) and the case (a problem plus its data), as plain frozen values.

May touch: NumPy and the oracle's layouts; never JAX. The text form is in case_text.py, the arrays in inputs.py.
Tests: tests/conformance/test_problem.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import oracle.layout

LAYOUTS = ("contiguous", "dual_chunk_swap", "striped")
AXIS_TYPES = ("auto", "explicit", "mixed")
DEVICE_ORDERS = ("natural", "reversed", "rotated")
DTYPES = ("float32", "bfloat16", "float64")
MATMUL_PRECISIONS = ("highest", "default")
VALUE_KINDS = (
    "plain",
    "peaked",
    "uniform",
    "needle",
    "rank_coded",
    "cancelling",
    "constant",
    "huge",
    "tiny",
)

Window = tuple[int | None, int | None]


class InvalidCase(ValueError):
    """A field of a problem or case breaks a rule; the message names the field, its value and the rule."""


@dataclass(frozen=True)
class Document:
    """A run of `length` positions that share a segment id; `segment_id` None: drawn from the case's seed."""

    length: int
    segment_id: int | None = None


@dataclass(frozen=True)
class Problem:
    """The static half of a case: hashable, and everything a target may know while it is traced.

    Where they are None, `value_dim` is filled in with head_dim, and `window` with `(sliding_window_size - 1, 0)`, or
    `(None, 0)` for a GLOBAL layer. `padding` is the padding_segment_id, or None. `precision` is the
    jax.default_matmul_precision while tracing.

    Raises:
        InvalidCase: a field breaks a rule.
    """

    batch: int = 1
    seq_len: int = 64
    num_query_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 8
    value_dim: int = None  # type: ignore[assignment]  # filled in by __post_init__: readers always see an int
    sliding_window_size: int | None = None
    window: Window = None  # type: ignore[assignment]  # filled in by __post_init__: readers always see a pair
    layout: str = "contiguous"
    context_parallelism: int = 2
    ulysses_parallelism: int = 1
    data_parallelism: int = 1
    tensor_parallelism: int = 1
    mesh_axes: tuple[str, ...] = ("data", "context", "tensor")
    axis_types: str = "auto"
    device_order: str = "natural"
    dtype: str = "float32"
    precision: str = "highest"
    attn_logits_soft_cap: float | None = None
    scale: float | None = None
    sinks: bool = False
    segments: bool = False
    padding: int | None = None
    shared_kv: bool = False

    def __post_init__(self) -> None:
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        # An integral scale or cap is stored as the float that its text is read as: equal problems have equal texts.
        for field in ("attn_logits_soft_cap", "scale"):
            if _is_int(getattr(self, field)):
                object.__setattr__(self, field, float(getattr(self, field)))
        size = self.sliding_window_size
        _require(size is None or (_is_int(size) and size >= 1), "sliding_window_size", size, "must be none or >= 1")
        if self.window is None:
            object.__setattr__(self, "window", window_of(self.sliding_window_size))
        _validate(self)

    def replace(self, **changes: Any) -> Problem:
        """A copy with some fields changed; a derived `window` or `value_dim` follows the fields it is derived from."""
        if "window" not in changes and self.window == window_of(self.sliding_window_size):
            changes["window"] = None
        if "value_dim" not in changes and self.value_dim == self.head_dim:
            changes["value_dim"] = None
        return dataclasses.replace(self, **changes)

    def positions(self) -> np.ndarray:
        """int32 [seq_len]: the position of the token that stands at each index of the arrays, in this layout."""
        return oracle.layout.permutation(self.layout, self.seq_len, self.context_parallelism).astype(np.int32)

    @property
    def num_devices(self) -> int:
        """Devices that the problem's mesh takes."""
        return math.prod(size for _, size in self.mesh_shape)

    @property
    def mesh_shape(self) -> tuple[tuple[str, int], ...]:
        """(axis, size) in mesh order; `ulysses` stands after `context` where ulysses_parallelism > 1."""
        sizes = {
            "data": self.data_parallelism,
            "context": self.context_parallelism,
            "tensor": self.tensor_parallelism,
        }
        shape: list[tuple[str, int]] = []
        for axis in self.mesh_axes:
            shape.append((axis, sizes[axis]))
            if axis == "context" and self.ulysses_parallelism > 1:
                shape.append(("ulysses", self.ulysses_parallelism))
        return tuple(shape)

    @property
    def num_chunks(self) -> int:
        """Chunks the sequence is cut into by the layout; under `striped` it counts ranks.

        The layout is that of the context axis alone: along `ulysses` a rank's rows are cut evenly.
        """
        ranks = self.context_parallelism
        return 2 * ranks if self.layout == "dual_chunk_swap" else ranks

    @property
    def chunk_len(self) -> int:
        """Positions of one chunk."""
        return self.seq_len // self.num_chunks

    def rank_of(self, position: int) -> int:
        """The rank along the context axis that holds `position`."""
        index = int(np.flatnonzero(self.positions() == position)[0])
        return index // (self.seq_len // self.context_parallelism)


@dataclass(frozen=True)
class Case:
    """A problem plus its data: one list of documents a batch row, the kind of values, the seed.

    `documents` None: every row is one document. Lengths of a row sum to seq_len.
    """

    problem: Problem = dataclasses.field(default_factory=lambda: Problem())
    documents: tuple[tuple[Document, ...], ...] | None = None
    values: str = "plain"
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.values in VALUE_KINDS, "values", self.values, f"must be one of {', '.join(VALUE_KINDS)}")
        _require(
            _is_int(self.seed) and 0 <= self.seed < 2**32, "seed", self.seed, "must be an integer from 0 to 2**32 - 1"
        )
        if self.documents is not None:
            _validate_documents(self)

    def replace(self, **changes: Any) -> Case:
        """A copy with some fields of the case, or of its problem, changed."""
        own = {field.name for field in dataclasses.fields(Case)}
        of_problem = {name: value for name, value in changes.items() if name not in own}
        of_case = {name: value for name, value in changes.items() if name in own}
        if of_problem:
            of_case["problem"] = of_case.get("problem", self.problem).replace(**of_problem)
        return dataclasses.replace(self, **of_case)


def window_of(sliding_window_size: int | None) -> Window:
    """`(left, right)` of W visible keys, self included; None is a GLOBAL layer."""
    return (None, 0) if sliding_window_size is None else (sliding_window_size - 1, 0)


def documents_of(rows: Sequence[Sequence[int]]) -> tuple[tuple[Document, ...], ...]:
    """Documents of given lengths, one sequence a batch row; their ids are drawn from the case's seed."""
    return tuple(tuple(Document(length) for length in row) for row in rows)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_segment_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**31) <= value < 2**31


def _require(holds: bool, field: str, value: object, rule: str) -> None:
    if not holds:
        raise InvalidCase(f"{field} {rule}, got {value!r}")


def _validate(problem: Problem) -> None:
    """Every rule of a problem, in the order of its fields."""
    for field in (
        "batch",
        "seq_len",
        "num_query_heads",
        "num_kv_heads",
        "head_dim",
        "value_dim",
        "context_parallelism",
        "ulysses_parallelism",
        "data_parallelism",
        "tensor_parallelism",
    ):
        value = getattr(problem, field)
        _require(_is_int(value) and value >= 1, field, value, "must be an integer >= 1")
    _validate_window(problem)
    for field, choices in (
        ("layout", LAYOUTS),
        ("axis_types", AXIS_TYPES),
        ("device_order", DEVICE_ORDERS),
        ("dtype", DTYPES),
        ("precision", MATMUL_PRECISIONS),
    ):
        value = getattr(problem, field)
        _require(value in choices, field, value, f"must be one of {', '.join(choices)}")
    for field in ("sinks", "segments", "shared_kv"):
        _require(isinstance(getattr(problem, field), bool), field, getattr(problem, field), "must be true or false")
    for field in ("attn_logits_soft_cap", "scale"):
        value = getattr(problem, field)
        number = isinstance(value, float) and math.isfinite(value) and value > 0
        _require(value is None or number, field, value, "must be none or a finite number > 0")
    _validate_divisibility(problem)


def _validate_window(problem: Problem) -> None:
    window = problem.window
    pair = isinstance(window, tuple) and len(window) == 2
    _require(pair, "window", window, "must be a pair (left, right)")
    for bound in window:
        _require(bound is None or (_is_int(bound) and bound >= 0), "window", window, "bounds must be none or >= 0")
    if problem.sliding_window_size is not None:
        derived = window_of(problem.sliding_window_size)
        _require(window == derived, "window", window, f"must be left out beside sliding_window_size, or be {derived}")


def _validate_divisibility(problem: Problem) -> None:
    orders = tuple(itertools.permutations(("data", "context", "tensor")))
    _require(problem.mesh_axes in orders, "mesh_axes", problem.mesh_axes, "must order data, context, tensor")
    context, ulysses = problem.context_parallelism, problem.ulysses_parallelism
    for field, divisor, name in (
        ("seq_len", problem.num_chunks, f"the {problem.num_chunks} chunks of {problem.layout}"),
        ("seq_len", context * ulysses, f"the {context * ulysses} devices of the context and ulysses axes"),
        ("batch", problem.data_parallelism, f"data_parallelism={problem.data_parallelism}"),
        ("num_query_heads", problem.num_kv_heads, f"num_kv_heads={problem.num_kv_heads}"),
        ("num_query_heads", problem.tensor_parallelism, f"tensor_parallelism={problem.tensor_parallelism}"),
    ):
        value = getattr(problem, field)
        _require(value % divisor == 0, field, value, f"must be divisible by {name}")
    padding = problem.padding
    _require(padding is None or _is_segment_id(padding), "padding", padding, "must be none or fit an int32")
    _require(padding is None or problem.segments, "padding", padding, "needs segments=true")
    same = problem.value_dim == problem.head_dim
    _require(same or not problem.shared_kv, "shared_kv", problem.shared_kv, "needs value_dim equal to head_dim")


def _validate_documents(case: Case) -> None:
    problem, documents = case.problem, case.documents
    assert documents is not None
    _require(problem.segments, "documents", "given", "needs segments=true")
    _require(
        len(documents) == problem.batch,
        "documents",
        f"{len(documents)} rows",
        f"must be one list for each of batch={problem.batch} rows",
    )
    for row in documents:
        lengths = [document.length for document in row]
        _require(all(_is_int(n) and n >= 1 for n in lengths), "documents", lengths, "lengths must be integers >= 1")
        _require(
            sum(lengths) == problem.seq_len,
            "documents",
            f"sum {sum(lengths)}",
            f"must sum to seq_len={problem.seq_len}",
        )
        for document in row:
            segment_id = document.segment_id
            valid = segment_id is None or _is_segment_id(segment_id)
            _require(valid, "documents", segment_id, "a segment id must fit an int32")
