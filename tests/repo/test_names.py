# SPDX-License-Identifier: Apache-2.0
"""Class names are unique, because a reader who searches for a name must find the right class."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import typing
from pathlib import Path

import pytest
from ratchets import ROOT, check, tracked

from source_code import parse_source

TAKEN = {*typing.__all__, *collections.abc.__all__, *vars(builtins)}
"""Names of Python's built-ins, and public names of `typing` and `collections.abc`."""


def classes(folder: str) -> dict[str, list[str]]:
    """Return the places of all classes below a folder, including nested and private ones, by class name."""
    places: dict[str, list[str]] = {}
    for path in tracked(".py"):
        if not path.is_relative_to(Path(folder)):
            continue
        for node in ast.walk(parse_source((ROOT / path).read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno} {node.name}")
    return places


@pytest.mark.parametrize("folder", ["worker/mizzen", "operator/mizzen_operator", "operator/mizzen_local"])
def test_class_names_are_unique(folder: str) -> None:
    duplicates = {name: places for name, places in classes(folder).items() if len(places) > 1}
    check(
        f"class_names {folder}",
        {name: len(places) for name, places in duplicates.items()},
        [place for places in duplicates.values() for place in places],
    )


@pytest.mark.parametrize("folder", ["worker/mizzen", "operator/mizzen_operator", "operator/mizzen_local"])
def test_no_class_has_the_name_of_a_standard_type(folder: str) -> None:
    taken = {name: places for name, places in classes(folder).items() if name in TAKEN}
    check(
        f"taken_class_names {folder}",
        {name: len(places) for name, places in taken.items()},
        [place for places in taken.values() for place in places],
    )
