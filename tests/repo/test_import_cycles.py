"""No module imports itself by way of others: neither for types alone, nor inside of a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from ratchets import ROOT, check, tracked

PACKAGES = ("worker", "operator")
"""Folders that hold packages; everywhere else, folders are on the path and hold modules."""


def module_name(path: Path) -> str:
    """Return how a file is imported; a module outside of packages is told apart by its folder."""
    parts = path.with_suffix("").parts
    if parts[0] in PACKAGES:
        return ".".join(part for part in parts[1:] if part != "__init__")
    return "/".join(parts)


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield module and name (or nothing) of all imports of a file, wherever they stand."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.module or "", alias.name


def graph() -> dict[str, set[str]]:
    """Return which of the repository's modules each of them imports."""
    paths = {module_name(path): path for path in tracked(".py")}
    edges: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        folder = "" if path.parts[0] in PACKAGES else f"{path.parent}/"
        for module, member in imported(ast.parse((ROOT / path).read_text())):
            candidates = (f"{module}.{member}", module, f"{folder}{module}", f"tests/shared/{module}")
            target = next((one for one in candidates if one in paths), None)
            if target is not None and target != name:
                edges[name].add(target)
    return edges


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of more than one node that reach each other (Tarjan), without recursion."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found = []
    for root in edges:
        if root in numbers:
            continue
        work = [(root, iter(sorted(edges[root])))]
        numbers[root] = lowest[root] = len(numbers)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in numbers:
                    numbers[target] = lowest[target] = len(numbers)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(sorted(edges[target]))))
                    break
                if target in on_stack:
                    lowest[node] = min(lowest[node], numbers[target])
            else:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[node])
                if lowest[node] == numbers[node]:
                    group = []
                    while not group or group[-1] != node:
                        group.append(stack.pop())
                        on_stack.discard(group[-1])
                    if len(group) > 1:
                        found.append(sorted(group))
    return sorted(found)


def test_cycles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert cycles(edges) == [["a", "b", "c"], ["d", "e"]]


def test_no_module_imports_itself_by_way_of_others() -> None:
    edges = graph()
    assert "mizzen.wire.messages" in edges["mizzen.wire.codec"]
    groups = cycles(edges)
    places = [
        f"{node} imports {target}"
        for group in groups
        for node in group
        for target in sorted(edges[node] & set(group))
    ]
    check("import_cycles", {" <-> ".join(group): len(group) for group in groups}, places)
