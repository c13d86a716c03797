# SPDX-License-Identifier: Apache-2.0
"""The notes of a release are a section of the changelog."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

import mizzen

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts/release/release_notes.py"))
LOG = """\
# Release notes

## 0.10.0 (unreleased)

- New.

## 0.1.0

### Added

- First, see [install](docs/install.md#upgrade) and [semver](https://semver.org).

## 0.0.1
"""


def test_the_section_of_a_version_ends_at_the_next_version() -> None:
    section = SCRIPT["find_section"](LOG, "0.1.0")
    assert section.startswith("### Added")
    assert section.endswith("[semver](https://semver.org).")


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.1", "no section of version 0.1"),
        ("0.10.0", "unreleased"),
        ("0.0.1", "empty"),
        ("1.0.0", "add `## 1"),
    ],
)
def test_a_version_without_finished_notes_is_refused(version: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SCRIPT["find_section"](LOG, version)


def test_a_draft_may_be_unreleased() -> None:
    assert SCRIPT["find_section"](LOG, "0.10.0", draft=True) == "- New."


def test_relative_links_become_absolute() -> None:
    section = SCRIPT["find_section"](LOG, "0.1.0")
    linked = SCRIPT["make_links_absolute"](section, "https://forge.example.com/blob/v0.1.0")
    assert "(https://forge.example.com/blob/v0.1.0/docs/install.md#upgrade)" in linked
    assert "(https://semver.org)" in linked


def test_the_changelog_has_a_section_of_this_version(run_script: Any) -> None:
    shown = run_script("release_notes.py", mizzen.__version__, "--draft", "--registry", "r.example.com/t")
    assert shown.returncode == 0, shown.stderr
    assert f"oci://r.example.com/t/charts/mizzen --version {mizzen.__version__}" in shown.stdout
    refused = run_script("release_notes.py", "99.0.0")
    assert refused.returncode == 1
    assert "no section of version 99.0.0" in refused.stderr
