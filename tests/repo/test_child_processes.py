# SPDX-License-Identifier: Apache-2.0
"""Rules for the Python programs that Mizzen starts as child processes."""

from __future__ import annotations

import ast
from pathlib import Path

from source_code import parse_source

ROOT = Path(__file__).parents[2]
INTERPRETER = "sys.executable"


def find_commands(source: str) -> list[list[str]]:
    """Return the elements of all lists and tuples that begin with the interpreter, as source text."""
    nodes = [node for node in ast.walk(parse_source(source)) if isinstance(node, (ast.List, ast.Tuple))]
    commands = [[ast.unparse(element) for element in node.elts] for node in nodes]
    return [command for command in commands if command[:1] == [INTERPRETER]]


def test_child_processes_do_not_import_from_the_current_folder() -> None:
    """The current folder may be that of a model, whose `json.py` a program without `-P` would run."""
    offenders: list[str] = []
    count = 0
    for folder in ("worker", "operator"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            commands = find_commands(source)
            count += len(commands)
            safe = [command for command in commands if command[1:2] == ["'-P'"]]
            if len(safe) < source.count(INTERPRETER):  # also if it is in no list, where this test needs it
                offenders.append(str(path.relative_to(ROOT)))
    assert count >= 9
    assert not offenders
