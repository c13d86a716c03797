# SPDX-License-Identifier: Apache-2.0
"""The site of the documentation keeps all versions, and its menu lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import build_docs  # pyright: ignore[reportMissingImports]
import pytest
import yaml

ROOT = Path(__file__).parents[2]
LIST: Any = build_docs.list_versions


def test_versions_are_listed_by_number_and_an_alias_moves() -> None:
    entries: list[dict[str, Any]] = []
    for version, alias in (("dev", ""), ("0.9.0", "latest"), ("0.10.0", "latest"), ("dev", "")):
        entries = LIST(entries, version, alias)
    assert [(entry["version"], entry["aliases"]) for entry in entries] == [
        ("0.10.0", ["latest"]),
        ("0.9.0", []),
        ("dev", []),
    ]


def test_a_patch_of_an_older_release_does_not_get_the_alias() -> None:
    entries: list[dict[str, Any]] = []
    for version in ("0.9.0", "0.10.0", "0.9.1", "dev"):
        entries = LIST(entries, version, "latest")
    assert [(entry["version"], entry["aliases"]) for entry in entries] == [
        ("0.10.0", ["latest"]),
        ("0.9.1", []),
        ("0.9.0", []),
        ("dev", []),
    ]


def test_a_folder_of_an_alias_is_a_copy_of_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(command: list[Any], **_: object) -> None:
        Path(command[-1]).mkdir(exist_ok=True)
        (Path(command[-1]) / "page").write_text(f"build {len(builds)}")
        builds.append(command)

    builds: list[list[Any]] = []
    monkeypatch.setattr(build_docs.subprocess, "run", build)
    for version, alias in (("0.10.0", "latest"), ("0.9.1", "latest"), ("0.10.0", "")):
        build_docs.build_docs(tmp_path, version, alias)
        pages = {path.parent.name: path.read_text() for path in tmp_path.glob("*/page")}
        assert pages["latest"] == pages["0.10.0"]
        assert "latest/" in (tmp_path / "index.html").read_text()
    assert pages == {"0.10.0": "build 2", "0.9.1": "build 1", "latest": "build 2"}


def test_a_version_that_is_built_again_keeps_its_alias() -> None:
    entries = LIST(LIST([], "0.1.0", "latest"), "0.1.0", "")
    assert entries == [{"version": "0.1.0", "title": "0.1.0", "aliases": ["latest"]}]


def test_the_theme_shows_the_menu_of_versions() -> None:
    extra = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["extra"]
    assert extra["version"] == {"provider": "mike", "default": "latest"}
