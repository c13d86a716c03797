# SPDX-License-Identifier: Apache-2.0
"""docs/regressions.md: each row names tests that exist, or says why the defect needs no test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from source_code import parse_source

ROOT = Path(__file__).parents[2]
ISSUE = re.compile(r"^[A-Za-z][A-Za-z-]*(#|-)\d+$")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
Row = tuple[str, str, str]


def rows() -> list[Row]:
    """Return the issues, the defect and the tests of each row of the table."""
    lines = (ROOT / "docs/regressions.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert {len(row) for row in cells} == {3}
    return [(row[0], row[1], row[2]) for row in cells if row[0] != "issue" and not row[0].startswith("-")]


def names_in(path: Path) -> set[str]:
    """Return the names of all functions in a file."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = parse_source(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_each_defect_has_a_test_or_a_reason(row: Row) -> None:
    issues, defect, tests = row
    assert defect and all(ISSUE.match(issue) for issue in issues.split(", "))
    named = NAMED.findall(tests)
    assert named or tests.startswith(("does not apply: ", "not tested: "))
    missing = [f"{file}::{name}" for file, name in named if name not in names_in(ROOT / file)]
    assert not missing


def test_no_issue_is_listed_twice() -> None:
    issues = [issue for row in rows() for issue in row[0].split(", ")]
    assert len(issues) == len(set(issues)) > 50
