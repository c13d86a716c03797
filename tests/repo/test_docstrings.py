# SPDX-License-Identifier: Apache-2.0
"""All public definitions have docstrings, and no docstring begins with a word such as "What" or "How"."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ratchets import ROOT, check, tracked

from source_code import parse_source

FOLDERS = ("worker/mizzen", "operator")
HEADLESS = re.compile(r"(What|Whether|How|Why|Who(?:m|se)?|That|Those|Of)\b")
"""First words of incomplete sentences. Docstrings of Booleans may nevertheless begin with `Whether`."""
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> Iterator[tuple[Path, ast.Module]]:
    """Yield the modules of the product, with their paths."""
    for path in tracked(".py"):
        if path.is_relative_to(FOLDERS[0]) or path.is_relative_to(FOLDERS[1]):
            yield path, parse_source((ROOT / path).read_text())


def documented(tree: ast.Module) -> Iterator[tuple[Documented, str]]:
    """Yield a module and its classes and functions with their names; skip definitions inside functions."""
    work: list[tuple[Documented, str]] = [(tree, "")]
    while work:
        node, name = work.pop()
        yield node, name
        if isinstance(node, ast.Module | ast.ClassDef):
            work += [
                (child, f"{name}.{child.name}".lstrip("."))
                for child in node.body
                if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            ]


def decorators(node: Documented) -> set[str]:
    """Return the names of a function's decorators, without modules; empty for a module or class."""
    if isinstance(node, ast.Module | ast.ClassDef):
        return set()
    return {getattr(mark, "attr", getattr(mark, "id", "")) for mark in node.decorator_list}


def is_property(node: Documented) -> bool:
    """Return whether a function is a property."""
    return bool(decorators(node) & {"property", "cached_property"})


def is_overload(node: Documented) -> bool:
    """Return whether a function is an overload, setter or override, which needs no docstring of its own."""
    return bool(decorators(node) & {"overload", "setter", "override"})


def attribute_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each string that follows an assignment in a module or class."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef):
            continue
        for statement, next_statement in itertools.pairwise(node.body):
            value = next_statement.value if isinstance(next_statement, ast.Expr) else None
            text = value.value if isinstance(value, ast.Constant) else None
            if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(text, str):
                yield next_statement.lineno, text


def test_everything_public_has_a_docstring() -> None:
    counts: Counter[str] = Counter()
    places = []
    for path, tree in sources():
        for node, name in documented(tree):
            private = any(segment.startswith("_") for segment in name.split("."))
            if not private and not is_overload(node) and not ast.get_docstring(node):
                counts[str(path.parent)] += 1
                places.append(f"{path}:{getattr(node, 'lineno', 1)} {name or 'the module'}")
    check("missing_docstrings", counts, places)


def test_no_docstring_begins_with_a_headless_clause() -> None:
    counts: Counter[str] = Counter()
    places = []
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if HEADLESS.match(text) and not (is_property(node) and text.startswith("Whether ")):
                    counts[str(path.parent)] += 1
                    places.append(f"{path}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}")
    check("headless_docstrings", counts, places)


def test_no_attribute_docstring_begins_with_a_headless_clause() -> None:
    counts: Counter[str] = Counter()
    places = []
    for path, tree in sources():
        for line, text in attribute_docstrings(tree):
            if HEADLESS.match(text) and not text.startswith("Whether "):
                counts[str(path.parent)] += 1
                places.append(f"{path}:{line} {text.splitlines()[0]}")
    check("headless_attribute_docstrings", counts, places)
