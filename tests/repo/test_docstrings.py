"""Everything public says what it is, and no docstring begins in the middle of a sentence."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ratchets import ROOT, check, tracked

FOLDERS = ("worker/mizzen", "operator")
HEADLESS = re.compile(r"(What|Whether|How|Why|Who|Whom|Whose|That|Those|Of)\b")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> Iterator[tuple[Path, ast.Module]]:
    """Yield the modules of the product, with their paths."""
    for path in tracked(".py"):
        if path.is_relative_to(FOLDERS[0]) or path.is_relative_to(FOLDERS[1]):
            yield path, ast.parse((ROOT / path).read_text())


def documented(tree: ast.Module) -> Iterator[tuple[Documented, str]]:
    """Yield module, classes and functions, with their names; what is inside of a function is not its API."""
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


def is_overload(node: Documented) -> bool:
    """Tell an `@overload`, or a setter, whose docstring stands at the function of the same name."""
    if isinstance(node, ast.Module | ast.ClassDef):
        return False
    marks = {getattr(mark, "attr", getattr(mark, "id", "")) for mark in node.decorator_list}
    return bool(marks & {"overload", "setter", "override"})


def attribute_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of strings that follow an assignment, in modules and classes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef):
            continue
        for before, after in itertools.pairwise(node.body):
            value = after.value if isinstance(after, ast.Expr) else None
            text = value.value if isinstance(value, ast.Constant) else None
            if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(text, str):
                yield after.lineno, text


def test_everything_public_has_a_docstring() -> None:
    counts: Counter[str] = Counter()
    places = []
    for path, tree in sources():
        for node, name in documented(tree):
            private = any(part.startswith("_") for part in name.split("."))
            if not private and not is_overload(node) and not ast.get_docstring(node):
                counts[str(path.parent)] += 1
                places.append(f"{path}:{getattr(node, 'lineno', 1)} {name or 'the module'}")
    check("missing_docstrings", counts, places)


def test_no_docstring_begins_without_a_head() -> None:
    counts: Counter[str] = Counter()
    places = []
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if HEADLESS.match(text):
                    counts[str(path.parent)] += 1
                    places.append(f"{path}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}")
    check("headless_docstrings", counts, places)


def test_no_docstring_of_an_attribute_begins_without_a_head() -> None:
    counts: Counter[str] = Counter()
    places = []
    for path, tree in sources():
        for line, text in attribute_docstrings(tree):
            if HEADLESS.match(text):
                counts[str(path.parent)] += 1
                places.append(f"{path}:{line} {text.splitlines()[0]}")
    check("headless_attribute_docstrings", counts, places)
