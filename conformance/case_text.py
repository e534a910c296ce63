"""The one-line text form of a case, and its JSON: `v=1 seq_len=512 sliding_window_size=100 seed=7`.

`key=value` pairs in any order; what equals its default is left out; `none` for absent, `,` inside a tuple, `+` between
documents (`length` or `length@segment_id`), `/` between batch rows. May touch: problem.py only.
Tests: tests/conformance/test_case_text.py.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from conformance.problem import Case, Document, InvalidCase, Problem, window_of

VERSION = 1


class CaseTextError(InvalidCase):
    """A text that is no case; the message names the key and, for an unknown one, the nearest right key."""


def format_case(case: Case) -> str:
    """The canonical text of a case: equal cases have equal texts, and `parse_case` gives the case back."""
    written = [f"v={VERSION}"]
    for key, value in _fields(case).items():
        written.append(f"{key}={_format_value(value)}")
    return " ".join(written)


def parse_case(text: str) -> Case:
    """The case of a text.

    Raises:
        CaseTextError: an unknown or repeated key, a value that cannot be read, another version.
        InvalidCase: values that break a rule of the problem.
    """
    return _build(read_fields(text))


def read_fields(text: str) -> dict[str, Any]:
    """The fields that a text names, with their values; they need not make a case.

    Raises:
        CaseTextError: an unknown or repeated key, or a value that cannot be read.
    """
    values: dict[str, Any] = {}
    for word in text.split():
        key, separator, written = word.partition("=")
        if not separator:
            raise CaseTextError(f"a case is key=value pairs, got {word!r}")
        reader = _reader(key)
        if key in values:
            raise CaseTextError(f"{key} is given twice")
        try:
            values[key] = reader(written)
        except ValueError as error:
            raise CaseTextError(f"{key} cannot be read from {written!r}: {error}") from None
    return values


def case_to_json(case: Case) -> dict[str, Any]:
    """The same content under the same names, for JSON; defaults are left out as in the text."""
    return {"v": VERSION, **{key: _json_value(value) for key, value in _fields(case).items()}}


def case_from_json(content: Mapping[str, Any]) -> Case:
    """The case of `case_to_json`; the same errors as `parse_case`."""
    for key in content:
        _reader(key)
    values = dict(content)
    for key, tuples in (("window", tuple), ("mesh_axes", tuple), ("documents", _json_documents)):
        if values.get(key) is not None:
            try:
                values[key] = tuples(values[key])
            except TypeError:
                raise CaseTextError(f"{key} cannot be read from {values[key]!r}") from None
    return _build(values)


def _json_documents(rows: Any) -> tuple[tuple[Document, ...], ...]:
    return tuple(tuple(Document(*item) if isinstance(item, list) else Document(item) for item in row) for row in rows)


def _fields(case: Case) -> dict[str, Any]:
    """What the text must say: every field that differs from what would be filled in for it."""
    problem = case.problem
    said: dict[str, Any] = {}
    for field in dataclasses.fields(Problem):
        value = getattr(problem, field.name)
        default = {
            "value_dim": problem.head_dim,
            "window": window_of(problem.sliding_window_size),
            "segments": case.documents is not None,
        }.get(field.name, field.default)
        if value != default:
            said[field.name] = value
    for field in dataclasses.fields(Case):
        if field.name != "problem" and getattr(case, field.name) != field.default:
            said[field.name] = getattr(case, field.name)
    return said


def _build(values: dict[str, Any]) -> Case:
    version = values.pop("v", VERSION)
    if version != VERSION:
        raise CaseTextError(f"v must be {VERSION}, got {version!r}")
    if values.get("documents") is not None:
        values.setdefault("segments", True)
    of_case = {key: values.pop(key) for key in ("documents", "values", "seed") if key in values}
    return Case(problem=Problem(**values), **of_case)


def _format_value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return "/".join("+".join(_format_document(document) for document in row) for row in value)
    if isinstance(value, tuple):
        return ",".join(_format_value(item) for item in value)
    return repr(value) if isinstance(value, float) else str(value)


def _format_document(document: Document) -> str:
    if document.segment_id is None:
        return str(document.length)
    return f"{document.length}@{document.segment_id}"


def _json_value(value: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return [[_json_document(document) for document in row] for row in value]
    return list(value) if isinstance(value, tuple) else value


def _json_document(document: Document) -> Any:
    return document.length if document.segment_id is None else [document.length, document.segment_id]


def _read_optional(reader: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda written: None if written == "none" else reader(written)


def _read_bool(written: str) -> bool:
    if written not in ("true", "false"):
        raise ValueError("must be true or false")
    return written == "true"


def _read_window(written: str) -> tuple[int | None, ...]:
    return tuple(_read_optional(int)(bound) for bound in written.split(","))


def _read_axes(written: str) -> tuple[str, ...]:
    return tuple(written.split(","))


def _read_documents(written: str) -> tuple[tuple[Document, ...], ...]:
    return tuple(tuple(_read_document(document) for document in row.split("+")) for row in written.split("/"))


def _read_document(written: str) -> Document:
    length, separator, segment_id = written.partition("@")
    return Document(int(length), int(segment_id) if separator else None)


_READERS: dict[str, Callable[[str], Any]] = {
    "v": int,
    **dict.fromkeys(("batch", "seq_len", "num_query_heads", "num_kv_heads", "head_dim", "value_dim"), int),
    "sliding_window_size": _read_optional(int),
    "window": _read_window,
    **dict.fromkeys(("layout", "axis_types", "device_order", "dtype", "precision", "values"), str),
    **dict.fromkeys(
        ("context_parallelism", "ulysses_parallelism", "data_parallelism", "tensor_parallelism", "seed"), int
    ),
    "mesh_axes": _read_axes,
    **dict.fromkeys(("attn_logits_soft_cap", "scale"), _read_optional(float)),
    **dict.fromkeys(("sinks", "segments", "shared_kv"), _read_bool),
    "padding": _read_optional(int),
    "documents": _read_optional(_read_documents),
}


def _reader(key: str) -> Callable[[str], Any]:
    if key in _READERS:
        return _READERS[key]
    nearest = difflib.get_close_matches(key, _READERS, n=1, cutoff=0.0)[0]
    raise CaseTextError(f"unknown key {key!r} in the case; the nearest key is {nearest!r}")
