# SPDX-License-Identifier: Apache-2.0
"""The version of a release has one source, and the other places that contain it agree."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

import mizzen

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts/release/set_version.py"))


def copy_tree(folder: Path) -> None:
    """Copy all files that may contain the version."""
    for path in (*SCRIPT["PLACES"], *(page for glob in SCRIPT["PAGES"] for page in ROOT.glob(glob))):
        target = folder / (ROOT / path).relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / path).read_bytes())


def test_all_files_have_the_version_of_the_package(run_script: Any) -> None:
    shown = run_script("set_version.py")
    assert shown.stdout.strip() == mizzen.__version__, shown.stderr


def test_the_distribution_takes_its_version_from_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in settings["project"]["dynamic"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "mizzen.__version__"}


def test_a_new_version_reaches_every_file(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    changed = SCRIPT["write_version"]("31.4.15", tmp_path)
    assert {*SCRIPT["PLACES"], "docs/images.md"} <= set(changed)
    assert SCRIPT["read_version"](tmp_path) == "31.4.15"
    assert '__version__ = "31.4.15"' in (tmp_path / "worker/mizzen/__init__.py").read_text()
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "regressions.md":
            left = re.findall(rf".*(?<![\d.]){re.escape(mizzen.__version__)}(?![\d.]).*", path.read_text())
            assert not [line for line in left if "release" not in line], path


def test_a_place_that_was_forgotten_is_named(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    chart = tmp_path / "charts/mizzen/Chart.yaml"
    chart.write_text(chart.read_text().replace(f"appVersion: {mizzen.__version__}", "appVersion: 9.9.9"))
    with pytest.raises(ValueError, match=r"charts/mizzen/Chart\.yaml:6 has 9\.9\.9"):
        SCRIPT["read_version"](tmp_path)
    chart.write_text("name: mizzen\n")
    with pytest.raises(ValueError, match=r"Chart\.yaml: .* matches 0 times"):
        SCRIPT["write_version"]("0.3.0", tmp_path)
    assert f'"{mizzen.__version__}"' in (tmp_path / "worker/mizzen/__init__.py").read_text()


@pytest.mark.parametrize("version", ["1", "1.2", "v1.2.3", "1.2.3rc1", "1.2.3 ", ""])
def test_a_version_that_is_not_three_numbers_is_refused(tmp_path: Path, version: str) -> None:
    with pytest.raises(ValueError, match="three numbers"):
        SCRIPT["write_version"](version, tmp_path)
