# SPDX-License-Identifier: Apache-2.0
"""Extracts strings, arguments of calls and keys of log fields from the worker's source code."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from source_code import parse_source

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "worker/mizzen"


@functools.cache
def trees(folder: Path = WORKER) -> tuple[ast.Module, ...]:
    """Return the syntax trees of all modules below a folder."""
    return tuple(parse_source(path.read_text()) for path in sorted(folder.rglob("*.py")))


def literals(pattern: str, folder: Path = WORKER) -> list[str]:
    """Return all string and bytes literals in the code that match a regular expression completely."""
    return sorted({text for tree in trees(folder) for text in _matching(tree, pattern)})


def _matching(tree: ast.AST, pattern: str) -> Iterator[str]:
    matches = re.compile(pattern, re.ASCII).fullmatch
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            if matches(text):
                yield text


def constants(tree: ast.Module) -> dict[str, Any]:
    """Return the values of all names to which a module assigns a literal."""
    values = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            values |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
    return values


def calls(*names: str) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Yield the name and arguments of all calls of the named functions; see `value_of` for the arguments."""
    for tree in trees():
        values = constants(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in names:
                keywords = {word.arg or "**": value_of(word.value, values) for word in node.keywords}
                yield name, [value_of(argument, values) for argument in node.args], keywords


def value_of(node: ast.expr, values: dict[str, Any]) -> Any:
    """Return the value of a literal or of a constant of the module; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    return values.get(node.id) if isinstance(node, ast.Name) else None


def log_fields() -> list[str]:
    """Return all keys that log calls pass in `extra={"fields": {...}}`."""
    keys = set()
    for tree in trees():
        named = {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Dict)
            for key, target in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant) and key.value == "fields" and isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                inner = [v for k, v in zip(node.keys, node.values, strict=True) if _is(k, "fields")]
            elif isinstance(node, ast.Assign) and any(getattr(t, "id", "") in named for t in node.targets):
                inner = [node.value]
            else:
                continue
            keys |= {key for part in inner for key in _keys(part)}
    return sorted(keys)


def _is(key: ast.expr | None, text: str) -> bool:
    return isinstance(key, ast.Constant) and key.value == text


def _keys(node: ast.expr) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Dict):
            yield from (key.value for key in part.keys if isinstance(key, ast.Constant))


def function_keys(function: Any) -> list[str]:
    """Return the keys of all dict literals in a function, sorted."""
    tree = parse_source(textwrap.dedent(inspect.getsource(function)))
    return sorted({key for key in _keys(tree) if isinstance(key, str)})
