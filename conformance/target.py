"""What a target is, and how one is loaded from `module:attribute` or `path/to/file.py:attribute`.

May touch: the user's module, in the worker process only. The contract is in docs/targets.md.
Tests: tests/conformance/test_target.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance.designated import asks_lse
from conformance.problem import Case, Problem

COMMUNICATIONS = ("halo", "all_gather", "ring", "ulysses", "usp")
EMPTY_ROWS = ("undefined", "zero")
DIRECTIONS = ("forward", "backward")


class Declined(Exception):  # the contract's word: a target raises Declined(reason)
    """Raised by a target in its forward: this problem is outside what it claims to support."""


class TargetError(Exception):
    """A target cannot be loaded; `report` is what its author needs to see, their own traceback included."""

    def __init__(self, report: str) -> None:
        super().__init__(report)
        self.report = report


@dataclass(frozen=True)
class TargetDescription:
    """What the parent process knows of a target: plain data that crosses the process border.

    `precision` holds the declared numerics, fields of `oracle.budget.Precision`. The defaults claim nothing.
    """

    spec: str
    name: str
    has_lse: bool = False
    communication: str | None = None
    precision: Mapping[str, Any] = field(default_factory=dict)
    empty_rows: str = "undefined"
    lse_grad: bool = True
    exact: bool = False
    halo_row_multiple: int = 1
    residual_names: tuple[str, ...] = ()
    tpu_kernels: tuple[str, ...] = ()
    """Those of DIRECTIONS in which every program of it for a TPU has a Pallas kernel, as it says."""
    tpu_precision: Mapping[str, Any] | None = None
    tpu_precision_varies: bool = False
    """Whether its `uses_tpu_precision` says of each problem if it is run with `tpu_precision`, or else `precision`."""
    changed_on_import: tuple[str, ...] = ()
    """What importing it changed of JAX's options and environment; it has been put back."""
    platform: str = "cpu"
    """That of the devices that it runs on here, which decides how many passes a float32 matmul takes."""

    @property
    def numerics(self) -> Mapping[str, Any]:
        """What it declares of its precision on its platform: many choose another kernel on a TPU."""
        return self.precision if self.platform != "tpu" or self.tpu_precision is None else self.tpu_precision

    def of_problem(self, uses_tpu_precision: bool) -> TargetDescription:
        """What it declares for one problem, of which it says whether it is run with `tpu_precision`."""
        return self if uses_tpu_precision else dataclasses.replace(self, tpu_precision=None)


@dataclass(frozen=True)
class Target:
    """A loaded target: its functions, and its description."""

    attention: Callable[..., Any]
    attention_with_lse: Callable[..., Any] | None
    supports: Callable[[Problem], str | None]
    description: TargetDescription
    uses_tpu_precision: Callable[[Problem, Any], bool] = lambda problem, mesh: True
    """Of a problem and a mesh of TPUs."""


def calls_of(target: TargetDescription, case: Case) -> tuple[str, ...]:
    """The functions of a target that a case calls: `attention`, and on every fourth seed `attention_with_lse` too.

    The second doubles a program; a quarter of the cases, and every shrunk one (its seed is 0 if it can be), are enough.
    """
    return ("attention", "attention_with_lse") if target.has_lse and asks_lse(case) else ("attention",)


def load_target(spec: str) -> Target:
    """The target that `spec` names.

    Raises:
        TargetError: no such module, file or attribute, an import that raises, or an attribute that is no target.
    """
    module_name, separator, attribute = spec.rpartition(":")
    if not separator or not module_name or not attribute:
        raise TargetError(f"a target is module:attribute or path/to/file.py:attribute, got {spec!r}")
    module = _import(module_name)
    if not hasattr(module, attribute):
        nearest = difflib.get_close_matches(attribute, [name for name in dir(module) if name[0] != "_"], n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise TargetError(f"{module_name} has no attribute {attribute!r}{hint}")
    return make_target(getattr(module, attribute), spec)


def make_target(candidate: Any, spec: str) -> Target:
    """The target behind a function, or behind an object with `attention` and the optional attributes of the contract.

    Raises:
        TargetError: it is neither, or an optional attribute has a value outside the contract.
    """
    if isinstance(candidate, type) and inspect.isfunction(inspect.getattr_static(candidate, "attention", None)):
        raise TargetError(f"{spec} is a class whose `attention` needs an instance: name an instance of it")
    attention = getattr(candidate, "attention", candidate)
    if not callable(attention):
        raise TargetError(f"{spec} is neither a function nor an object with a callable `attention`, got {candidate!r}")
    with_lse = _function(candidate, spec, "attention_with_lse")
    description = TargetDescription(
        spec=spec,
        name=str(getattr(candidate, "name", spec)),
        has_lse=with_lse is not None,
        communication=_choice(candidate, spec, "communication", None, COMMUNICATIONS),
        precision=_precision(candidate, spec, "precision"),
        tpu_precision=_precision(candidate, spec, "tpu_precision") if hasattr(candidate, "tpu_precision") else None,
        tpu_precision_varies=(uses := _function(candidate, spec, "uses_tpu_precision")) is not None,
        empty_rows=_choice(candidate, spec, "empty_rows", "undefined", EMPTY_ROWS),
        lse_grad=_choice(candidate, spec, "lse_grad", True, (True, False)),
        exact=_choice(candidate, spec, "exact", False, (True, False)),
        halo_row_multiple=_halo_row_multiple(candidate, spec),
        residual_names=_residual_names(candidate, spec),
        tpu_kernels=_tpu_kernels(candidate, spec),
    )
    supports = _function(candidate, spec, "supports") or (lambda problem: None)
    return Target(attention, with_lse, supports, description, uses or (lambda problem, mesh: True))


def _import(module_name: str) -> ModuleType:
    """Imports a module as `python` started in this folder would: the working directory is on the path."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        if module_name.endswith(".py"):
            return _import_file(Path(module_name))
        return importlib.import_module(module_name)
    except TargetError:
        raise
    except BaseException as error:  # foreign code: sys.exit() at import must not end the worker silently
        raise TargetError(_own_traceback(error)) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _own_traceback(error: BaseException) -> str:
    """The traceback from the first frame outside of this file and the import machinery on: the user's own lines."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(own)] if own else []
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()


def _function(candidate: Any, spec: str, attribute: str) -> Callable[..., Any] | None:
    value = getattr(candidate, attribute, None)
    if value is not None and not callable(value):
        raise TargetError(f"{spec}.{attribute} must be a function, got {value!r}")
    return value


def _choice(candidate: Any, spec: str, attribute: str, default: Any, choices: tuple[Any, ...]) -> Any:
    value = getattr(candidate, attribute, default)
    if value != default and value not in choices:
        raise TargetError(f"{spec}.{attribute} must be one of {', '.join(map(str, choices))}, got {value!r}")
    return value


def _precision(candidate: Any, spec: str, attribute: str) -> dict[str, Any]:
    """The declared numerics: their names and values are judged by the parent, but plain data they must be."""
    value = getattr(candidate, attribute, {})
    if not isinstance(value, Mapping) or not all(isinstance(item, int | None) for item in value.values()):
        raise TargetError(f"{spec}.{attribute} must map fields of oracle.budget.Precision to values, got {value!r}")
    return dict(value)


def _halo_row_multiple(candidate: Any, spec: str) -> int:
    value = getattr(candidate, "halo_row_multiple", 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TargetError(f"{spec}.halo_row_multiple must be an integer >= 1, got {value!r}")
    return value


def _residual_names(candidate: Any, spec: str) -> tuple[str, ...]:
    value = getattr(candidate, "residual_names", ())
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise TargetError(f"{spec}.residual_names must be a tuple of checkpoint names, got {value!r}")
    return tuple(value)


def _tpu_kernels(candidate: Any, spec: str) -> tuple[str, ...]:
    value = getattr(candidate, "tpu_kernels", ())
    if not isinstance(value, tuple) or not set(value) <= set(DIRECTIONS):
        raise TargetError(f"{spec}.tpu_kernels must be a tuple of {', '.join(DIRECTIONS)}, got {value!r}")
    return value
