# SPDX-License-Identifier: Apache-2.0
"""Mutants of a module: copies with one condition, number, operand, element or statement changed.

Mutants depend only on the syntax of the source, so names and wording do not matter. If a mutant behaves like
the original, a comment above its line in the source says so, with the kind of change:

    # equivalent mutant (boundary): equal numbers give the same result
    return a if a < b else b
"""

from __future__ import annotations

import ast
import copy
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

EQUIVALENT = re.compile(r"# equivalent mutants? \(([a-z, -]+)\): \S")
MAX_LOOPS = 10_000
"""Total number of iterations of a mutant's `while` loops after which the mutant counts as endless."""

Change = Callable[[ast.AST], None]
"""A function that changes a node of a copied tree in place."""


@dataclass(frozen=True)
class Mutant:
    """One change of a module.

    Attributes:
        kind: kind of change, such as `drop operand`.
        line: line of the changed code in the source.
        place: function that holds the code, and the code before the change.
        statement: index, among the module's statements, of the function or class that holds the code.
        node: index of the changed node in that statement, in the order of `ast.walk`.
        change: function that changes that node in a copy of the statement.
    """

    kind: str
    line: int
    place: str
    statement: int
    node: int
    change: Change

    def __str__(self) -> str:
        return f"line {self.line}, {self.kind}: {self.place}"


class EndlessLoopError(Exception):
    """The `while` loops of a mutant exceeded MAX_LOOPS iterations."""


class Subject:
    """A private copy of a module, to which one mutation at a time is applied."""

    def __init__(self, module: types.ModuleType) -> None:
        self._source = Path(str(module.__file__)).read_text()
        self._tree = ast.parse(self._source)
        self._statements = [pickle.dumps(statement) for statement in self._tree.body]
        """Pickled statements, from which fresh copies are made faster than by `deepcopy`."""
        self._rounds = 0
        self._copy = types.ModuleType(f"{module.__name__}_copy")
        self._copy.__dict__["_next_round"] = self._next_round
        sys.modules[self._copy.__name__] = self._copy  # `dataclass` needs the module there
        self._run(ast.parse(self._source).body)

    def mutants(self) -> list[Mutant]:
        """Return all mutants except the ones that comments declare to be equivalent.

        Raises:
            AssertionError: a comment declares a mutant that does not exist.
        """
        all_mutants = list(_mutants(self._tree))
        kinds = {(mutant.line, mutant.kind) for mutant in all_mutants}
        equivalent = {
            (number, kind.strip())
            for number, line in enumerate(self._source.splitlines(), 2)
            if (declaration := EQUIVALENT.search(line))
            for kind in declaration[1].split(",")
        }
        assert equivalent <= kinds, f"no such mutants: {sorted(equivalent - kinds)}"
        return [mutant for mutant in all_mutants if (mutant.line, mutant.kind) not in equivalent]

    @contextmanager
    def applied(self, mutant: Mutant) -> Iterator[types.ModuleType]:
        """Yield the copy with one mutation, and restore it afterwards."""
        changed = pickle.loads(self._statements[mutant.statement])
        mutant.change(list(ast.walk(changed))[mutant.node])
        before = dict(self._copy.__dict__)
        self._rounds = 0
        self._run([changed])
        try:
            yield self._copy
        finally:
            self._copy.__dict__.update(before)

    def _run(self, statements: list[ast.stmt]) -> None:
        """Execute statements in the copy, with a limit on the iterations of their `while` loops."""
        for node in (node for statement in statements for node in ast.walk(statement)):
            if isinstance(node, ast.While):
                node.test = ast.BoolOp(ast.And(), [ast.parse("_next_round()", mode="eval").body, node.test])
        tree = ast.fix_missing_locations(ast.Module(statements, []))
        code = compile(tree, "mutant.py", "exec", dont_inherit=True, flags=annotations.compiler_flag)
        exec(code, self._copy.__dict__)

    def _next_round(self) -> bool:
        self._rounds += 1
        if self._rounds > MAX_LOOPS:
            raise EndlessLoopError
        return True


def _mutants(tree: ast.Module) -> Iterator[Mutant]:
    for index, statement in enumerate(tree.body):
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        owners: dict[int, str] = {}
        for function in ast.walk(statement):  # outer ones come first, so that inner ones win
            if isinstance(function, ast.FunctionDef):
                owners.update((id(node), function.name) for part in function.body for node in ast.walk(part))
                owners[id(function)] = function.name
        for number, node in enumerate(ast.walk(statement)):
            if id(node) in owners:
                for kind, part, change in _changes(node):
                    place = f"{owners[id(node)]}(): {_shown(part)}"
                    yield Mutant(kind, getattr(part, "lineno", 0), place, index, number, change)


def _shown(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 90 else f"{text[:87]}..."


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, Change]]:
    """Yield each possible change of a node: its kind, the changed part, and the function that applies it."""
    match node:
        case ast.BoolOp(op=operator, values=values):
            for index, value in enumerate(values):
                neutral = ast.Constant(isinstance(operator, ast.And))
                yield "drop operand", value, _replaced("values", index, neutral)
        case ast.Compare(ops=[operator]):
            for kind, other in _COMPARISONS[type(operator)]:
                yield kind, node, _with("ops", [other()])
        case ast.BinOp(op=operator) if type(operator) in _OPERATORS:
            yield "other operator", node, _with("op", _OPERATORS[type(operator)]())
            zero = "set()" if isinstance(node.right, ast.Set | ast.SetComp) else "0"
            for field in ("left", "right"):
                yield "drop term", getattr(node, field), _with(field, ast.parse(zero, mode="eval").body)
        case ast.UnaryOp(op=ast.Not()):
            yield "drop not", node, _with("operand", ast.UnaryOp(ast.Not(), node.operand))
        case ast.Constant(value=bool()):
            yield "other constant", node, _with("value", not node.value)
        case ast.Constant(value=int(number)):
            yield "other constant", node, _with("value", number + 1)
        case ast.IfExp():
            yield "always", node.test, _with("test", ast.Constant(True))
            yield "never", node.test, _with("test", ast.Constant(False))
        case ast.If():
            yield "always", node.test, _with("test", ast.Constant(True))
            yield "never", node.test, _with("test", ast.Constant(False))
        case ast.While():
            yield "never", node.test, _with("test", ast.Constant(False))
        case ast.Return(value=ast.BoolOp() | ast.Compare() | ast.UnaryOp(op=ast.Not())):
            yield "always", node, _with("value", ast.Constant(True))
            yield "never", node, _with("value", ast.Constant(False))
        case ast.comprehension(ifs=conditions):
            yield "no elements", node.iter, _with("ifs", [ast.Constant(False)])
            for index, condition in enumerate(conditions):
                yield "drop condition", condition, _without("ifs", index)
        case ast.List(elts=elements, ctx=ast.Load()) | ast.Tuple(elts=elements, ctx=ast.Load()):
            for index, element in enumerate(elements):
                yield "drop element", element, _without("elts", index)
        case ast.Subscript(slice=ast.Slice()):
            yield "drop slice", node.slice, _with("slice", ast.Slice())
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            yield "other bound", node, _with("func", ast.Name("max" if name == "min" else "min", ast.Load()))
            for index, argument in enumerate(node.args if len(node.args) > 1 else []):
                yield "drop bound", argument, _keep_other(index)
        case ast.Call(func=ast.Name(id="sorted")):
            for index, keyword in enumerate(node.keywords):
                yield "drop keyword", keyword.value, _without("keywords", index)
    for name in ("body", "orelse"):
        statements = getattr(node, name, None)
        for index, statement in enumerate(statements if isinstance(statements, list) else []):
            if isinstance(statement, ast.Expr | ast.AugAssign) and not _is_text(statement):
                yield "drop statement", statement, _replaced(name, index, ast.Pass())


_COMPARISONS: dict[type[ast.cmpop], list[tuple[str, type[ast.cmpop]]]] = {
    ast.Eq: [("negate", ast.NotEq)],
    ast.NotEq: [("negate", ast.Eq)],
    ast.In: [("negate", ast.NotIn)],
    ast.NotIn: [("negate", ast.In)],
    ast.Is: [("negate", ast.IsNot)],
    ast.IsNot: [("negate", ast.Is)],
    ast.Lt: [("negate", ast.GtE), ("boundary", ast.LtE)],
    ast.LtE: [("negate", ast.Gt), ("boundary", ast.Lt)],
    ast.Gt: [("negate", ast.LtE), ("boundary", ast.GtE)],
    ast.GtE: [("negate", ast.Lt), ("boundary", ast.Gt)],
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _with(field: str, value: object) -> Change:
    return lambda node: setattr(node, field, copy.deepcopy(value))


def _without(field: str, index: int) -> Change:
    def change(node: ast.AST) -> None:
        del getattr(node, field)[index]

    return change


def _keep_other(index: int) -> Change:
    """Return the change that drops an operand of a call; if one operand is left, it replaces the call."""

    def change(node: ast.AST) -> None:
        assert isinstance(node, ast.Call)
        del node.args[index]
        if len(node.args) == 1:
            node.func, node.keywords = ast.parse("(lambda value: value)", mode="eval").body, []

    return change


def _replaced(field: str, index: int, value: ast.AST) -> Change:
    def change(node: ast.AST) -> None:
        getattr(node, field)[index] = copy.deepcopy(value)

    return change
