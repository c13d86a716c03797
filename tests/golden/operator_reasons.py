# SPDX-License-Identifier: Apache-2.0
"""Collects, from the operator's source code, the words that it writes into statuses, Events and metrics.

Nothing here depends on module or class names: every argument named `reason` is a reason. Names are resolved
in the module that uses them, so the result stays the same if a literal becomes a constant.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import mizzen_operator
from source_code import parse_source

WORD = re.compile(r"[A-Z][a-z0-9]+(?:[A-Z]+[a-z0-9]*)*")
Function = ast.FunctionDef | ast.AsyncFunctionDef
TYPED = {"cast", "TypeVar", "NewType"}
"""Calls whose first argument names a type."""


def load_modules() -> Iterator[tuple[ModuleType, ast.Module]]:
    """Yield every module of the operator, with its syntax tree."""
    for info in pkgutil.walk_packages(mizzen_operator.__path__, "mizzen_operator."):
        module = importlib.import_module(info.name)
        yield module, parse_source(inspect.getsource(module))


def collect_reasons() -> dict[str, Any]:
    """Return the reasons of each condition type, and all other reasons (of Events, errors and actions).

    Reasons of readiness gates (types such as `mizzen.dev/routable`) are covered by `collect_literals`.
    """
    conditions: defaultdict[str, set[str]] = defaultdict(set)
    other_reasons: set[str] = set()
    for module, tree in load_modules():
        for call, scopes in walk_calls(tree, ()):
            place = _Place(module, tree, scopes)
            arguments = place.argument(call, "reason")
            reasons = {text for argument in arguments for text in place.texts(argument)}
            kinds = {text for argument in place.argument(call, "type") for text in place.texts(argument)}
            if arguments and kinds:
                for kind in kinds:
                    conditions[kind] |= reasons
            else:
                other_reasons |= reasons
    of_services = {kind: sorted(reasons) for kind, reasons in conditions.items() if "/" not in kind}
    return {"conditions": of_services, "others": sorted(other_reasons - {""})}


def collect_literals() -> list[str]:
    """Return all string literals, and all literal parts of f-strings, that are one CamelCase word.

    These include all reasons, condition types, kinds, enumeration values of the CRD and metric label values.
    """
    texts: set[str] = set()
    for _, tree in load_modules():
        skipped = {id(part) for node in ast.walk(tree) for part in _types(node)}
        texts |= {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and id(node) not in skipped
            if isinstance(node.value, str) and WORD.fullmatch(node.value)
        }
    return sorted(texts)


def _types(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node that name types.

    These are its annotations and, if the node is a call of a function in TYPED, its first argument.
    """
    annotations = [getattr(node, name, None) for name in ("annotation", "returns")]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TYPED:
        annotations.append(node.args[0])
    for annotation in annotations:
        if annotation is not None:
            yield from ast.walk(annotation)


def walk_calls(
    node: ast.AST, scopes: tuple[Function, ...]
) -> Iterator[tuple[ast.Call, tuple[Function, ...]]]:
    """Yield all calls below a node, each with its enclosing functions, the innermost first."""
    if isinstance(node, ast.Call):
        yield node, scopes
    inner = (node, *scopes) if isinstance(node, Function) else scopes
    for child in ast.iter_child_nodes(node):
        yield from walk_calls(child, inner)


class _Place:
    """A position in a module, from which names are resolved."""

    def __init__(self, module: ModuleType, tree: ast.Module, scopes: tuple[Function, ...]) -> None:
        self._module, self._tree, self._scopes = module, tree, scopes

    def argument(self, call: ast.Call, name: str) -> list[ast.expr]:
        """Return, as a list, the argument that a call passes for a parameter; empty if it passes no argument.

        Positional arguments are found only if the call makes an instance of a class.
        """
        named = [keyword.value for keyword in call.keywords if keyword.arg == name]
        callee = self._value(call.func)
        if named or not isinstance(callee, type):
            return named
        try:
            names = list(inspect.signature(callee).parameters)
        except ValueError:
            return []
        return call.args[names.index(name) :][:1] if name in names else []

    def texts(self, node: ast.expr, depth: int = 0) -> set[str]:
        """Return the string values that an expression may have, as far as the source code determines them."""
        if depth > 8:
            return set()
        if isinstance(node, ast.IfExp):
            return self.texts(node.body, depth + 1) | self.texts(node.orelse, depth + 1)
        if isinstance(node, ast.BoolOp):
            return {text for value in node.values for text in self.texts(value, depth + 1)}
        if isinstance(node, ast.Name):
            for function in self._scopes:
                sources = [*_assigned(function, node.id), *self._passed(function, node.id)]
                if sources:
                    return {text for source in sources for text in self.texts(source, depth + 1)}
        value = node.value if isinstance(node, ast.Constant) else self._value(node)
        if isinstance(value, enum.Enum):
            value = value.value
        return {value} if isinstance(value, str) else set()

    def _passed(self, function: Function, name: str) -> list[ast.expr]:
        """Return the arguments that calls within the module pass for a parameter of a function."""
        names = [
            parameter.arg
            for parameter in (*function.args.posonlyargs, *function.args.args)
            if parameter.arg != "self"
        ]
        passed: list[ast.expr] = []
        for call, _ in walk_calls(self._tree, ()) if name in names else ():
            called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if called == function.name:
                passed += call.args[names.index(name) :][:1]
                passed += [keyword.value for keyword in call.keywords if keyword.arg == name]
        return passed

    def _value(self, node: ast.expr) -> Any:
        """Return the value of a dotted name in the module; None if the name is not defined."""
        parts = ast.unparse(node).split(".")
        if not all(part.isidentifier() for part in parts):
            return None
        value = getattr(self._module, parts[0], None)
        for part in parts[1:]:
            value = getattr(value, part, None)
        return value


def _assigned(function: Function, name: str) -> list[ast.expr]:
    return [
        child.value
        for child in ast.walk(function)
        if isinstance(child, ast.Assign) and [ast.unparse(target) for target in child.targets] == [name]
    ]
