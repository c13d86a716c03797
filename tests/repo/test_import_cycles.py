# SPDX-License-Identifier: Apache-2.0
"""There are no import cycles, even if imports for type checking and inside functions are counted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from ratchets import ROOT, check, tracked

from source_code import parse_source

PACKAGES = ("worker", "operator")
"""Folders that contain packages; all other folders are on `sys.path` and contain top-level modules."""


def module_name(path: Path) -> str:
    """Return the dotted name of a module in a package; for any other module, its path without suffix."""
    parts = path.with_suffix("").parts
    if parts[0] in PACKAGES:
        return ".".join(part for part in parts[1:] if part != "__init__")
    return "/".join(parts)


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the module and the imported name ("" for `import m`) of each import, including nested ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.module or "", alias.name


def graph() -> dict[str, set[str]]:
    """Return the repository's modules, each with the modules of the repository that it imports."""
    paths = {module_name(path): path for path in tracked(".py")}
    edges: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        folder = "" if path.parts[0] in PACKAGES else f"{path.parent}/"
        for module, member in imported(parse_source((ROOT / path).read_text())):
            candidates = (f"{module}.{member}", module, f"{folder}{module}", f"tests/shared/{module}")
            target = next((candidate for candidate in candidates if candidate in paths), None)
            if target is not None and target != name:
                edges[name].add(target)
    return edges


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components with more than one node, by Tarjan's algorithm."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    components = []
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
                        components.append(sorted(group))
    return sorted(components)


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
