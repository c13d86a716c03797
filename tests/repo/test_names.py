"""A class has a name of its own: one of two of a name is always the wrong one when a reader looks for it."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import typing
from pathlib import Path

import pytest
from ratchets import ROOT, check, tracked

TAKEN = {*typing.__all__, *collections.abc.__all__, *vars(builtins)}
"""Names that mean something else to everybody."""


def classes(folder: str) -> dict[str, list[str]]:
    """Return the classes below a folder, nested and private ones too, with their places."""
    found: dict[str, list[str]] = {}
    for path in tracked(".py"):
        if not path.is_relative_to(Path(folder)):
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(f"{path}:{node.lineno} {node.name}")
    return found


@pytest.mark.parametrize("folder", ["worker/mizzen", "operator/mizzen_operator", "operator/mizzen_local"])
def test_no_two_classes_have_one_name(folder: str) -> None:
    found = {name: places for name, places in classes(folder).items() if len(places) > 1}
    check(
        f"class_names {folder}",
        {name: len(places) for name, places in found.items()},
        [place for places in found.values() for place in places],
    )


@pytest.mark.parametrize("folder", ["worker/mizzen", "operator/mizzen_operator", "operator/mizzen_local"])
def test_no_class_has_the_name_of_a_type_that_everybody_knows(folder: str) -> None:
    found = {name: places for name, places in classes(folder).items() if name in TAKEN}
    check(
        f"taken_class_names {folder}",
        {name: len(places) for name, places in found.items()},
        [place for places in found.values() for place in places],
    )
