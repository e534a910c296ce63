"""Every small change of a file of `impl`, one at a time: what `mutate_impl.py` puts to the checks.

A comparison, a number by one, a sum to a difference, a sign, an axis for another, the larger for the smaller, the ends
of a permutation's pairs. May touch: the sources, to read them.
"""

import ast
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.BitAnd: ast.BitOr, ast.And: ast.Or, ast.Or: ast.And}
_NAMES = {
    "context_axis": "data_axis",
    "data_axis": "context_axis",
    "tensor_axis": "context_axis",
    "ulysses_axis": "context_axis",
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "rows_before": "rows_after",
    "rows_after": "rows_before",
}


@dataclass(frozen=True)
class Mutant:
    """One change: the file (under impl, without .py), the line, what was changed, and the whole new source.

    `lines`: the first and the last line of the statement that is changed, without the body of a compound one.
    """

    file: str
    line: int
    lines: tuple[int, int]
    change: str
    source: str


def mutants_of(file: str) -> Iterator[Mutant]:
    """Every mutant of a file, in the order of its lines."""
    tree = ast.parse((ROOT / "impl" / f"{file}.py").read_text())
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found = []
    for index, node in enumerate(ast.walk(tree)):
        for change, mutate in _changes(node):
            changed = copy.deepcopy(tree)
            mutate(next(other for number, other in enumerate(ast.walk(changed)) if number == index))
            around = ast.unparse(parents.get(node, node))[:90].replace("\n", " ")
            line = getattr(node, "lineno", 0)
            found.append(Mutant(file, line, _lines(node, parents), f"{change} in {around}", ast.unparse(changed)))
    yield from sorted(found, key=lambda mutant: mutant.line)


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """(what, how) of each change of one node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        comparison = _COMPARISONS[type(node.ops[0])]
        yield f"{ast.unparse(node)} with {comparison.__name__}", lambda at: at.ops.__setitem__(0, comparison())
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in _OPERATORS:
        operator = _OPERATORS[type(node.op)]
        yield f"{ast.unparse(node)[:60]} with {operator.__name__}", lambda at: setattr(at, "op", operator())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield f"{ast.unparse(node)[:60]} without its sign", lambda at: setattr(at, "op", ast.UAdd())
    if isinstance(node, ast.Constant) and type(node.value) is int:
        for value in (node.value + 1, node.value - 1):
            yield f"{node.value} as {value}", lambda at, value=value: setattr(at, "value", value)
    for field in ("id", "attr"):
        name = getattr(node, field, None)
        if name in _NAMES and isinstance(getattr(node, "ctx", None), ast.Load):
            yield f"{name} as {_NAMES[name]}", lambda at, field=field, name=name: setattr(at, field, _NAMES[name])
    if (
        isinstance(node, ast.ListComp | ast.GeneratorExp)
        and isinstance(node.elt, ast.Tuple)
        and len(node.elt.elts) == 2
    ):
        yield f"{ast.unparse(node.elt)} reversed", lambda at: at.elt.elts.reverse()


def _lines(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> tuple[int, int]:
    while not isinstance(node, ast.stmt):
        node = parents[node]
    body = getattr(node, "body", None)
    first = min((decorator.lineno for decorator in getattr(node, "decorator_list", ())), default=node.lineno)
    return first, max(first, body[0].lineno - 1) if body else node.end_lineno or node.lineno
