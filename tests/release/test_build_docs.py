# SPDX-License-Identifier: Apache-2.0
"""The site of the documentation keeps all versions, and its menu lists them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
LIST: Any = runpy.run_path(str(ROOT / "scripts/release/build_docs.py"))["list_versions"]


def test_versions_are_listed_by_number_and_an_alias_moves() -> None:
    entries: list[dict[str, Any]] = []
    for version, alias in (("dev", ""), ("0.9.0", "latest"), ("0.10.0", "latest"), ("dev", "")):
        entries = LIST(entries, version, alias)
    assert [(entry["version"], entry["aliases"]) for entry in entries] == [
        ("0.10.0", ["latest"]),
        ("0.9.0", []),
        ("dev", []),
    ]


def test_a_version_that_is_built_again_keeps_its_alias() -> None:
    entries = LIST(LIST([], "0.1.0", "latest"), "0.1.0", "")
    assert entries == [{"version": "0.1.0", "title": "0.1.0", "aliases": ["latest"]}]


def test_the_theme_shows_the_menu_of_versions() -> None:
    extra = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["extra"]
    assert extra["version"] == {"provider": "mike", "default": "latest"}
