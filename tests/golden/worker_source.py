"""What the worker's source says, wherever it lies: strings, arguments of calls, keys of log fields."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "worker/mizzen"


@functools.cache
def trees(folder: Path = WORKER) -> tuple[ast.Module, ...]:
    """Return the syntax trees of all modules below a folder."""
    return tuple(ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py")))


def literals(pattern: str, folder: Path = WORKER) -> list[str]:
    """Return all strings of the code, bytes too, that a regular expression matches as a whole."""
    return sorted({text for tree in trees(folder) for text in _matching(tree, pattern)})


def _matching(tree: ast.AST, pattern: str) -> Iterator[str]:
    matches = re.compile(pattern, re.ASCII).fullmatch
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            if matches(text):
                yield text


def constants(tree: ast.Module) -> dict[str, Any]:
    """Return the values of names that a module sets to a literal."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
    return found


def calls(*names: str) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Yield name, positional and keyword arguments of all calls of some functions; None is no literal."""
    for tree in trees():
        known = constants(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in names:
                keywords = {word.arg or "**": value_of(word.value, known) for word in node.keywords}
                yield name, [value_of(argument, known) for argument in node.args], keywords


def value_of(node: ast.expr, known: dict[str, Any]) -> Any:
    """Return the value of a literal or of a constant of the module; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    return known.get(node.id) if isinstance(node, ast.Name) else None


def log_fields() -> list[str]:
    """Return the members that log lines get by `extra={"fields": {...}}`."""
    found = set()
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
            found |= {key for part in inner for key in _keys(part)}
    return sorted(found)


def _is(key: ast.expr | None, text: str) -> bool:
    return isinstance(key, ast.Constant) and key.value == text


def _keys(node: ast.expr) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Dict):
            yield from (key.value for key in part.keys if isinstance(key, ast.Constant))


def function_keys(function: Any) -> list[str]:
    """Return the members of the JSON objects that a function writes out, sorted."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return sorted({key for key in _keys(tree) if isinstance(key, str)})
