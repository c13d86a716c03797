# SPDX-License-Identifier: Apache-2.0
"""The dashboards conform to Grafana's types (`@grafana/schema`), as checked by the TypeScript compiler."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent / "types"
FOLDER = ROOT / "charts/mizzen/dashboards"
Check = Callable[[dict[str, str]], str]
BOARDS = sorted(path.stem for path in FOLDER.glob("*.json"))

pytestmark = [pytest.mark.xdist_group("observability")]


@pytest.fixture(scope="module")
def modules() -> Path:
    """Return the folder node_modules in the user's cache; npm fills it once, as package.json specifies."""
    if shutil.which("npm") is None and not os.environ.get("CI"):
        pytest.skip("needs npm")
    pins = json.loads((HERE / "package.json").read_text())["dependencies"]
    name = "-".join(re.sub(r"\W+", "-", f"{package}-{version}") for package, version in sorted(pins.items()))
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(base) / "mizzen-local" / "node" / name.strip("-")
    if not (cache / "node_modules").is_dir():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as work:
            shutil.copy2(HERE / "package.json", work)
            command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
            subprocess.run(command, cwd=work, check=True, timeout=240)
            shutil.copytree(work, cache, dirs_exist_ok=True)
    return cache / "node_modules"


@pytest.fixture
def check(modules: Path, tmp_path: Path) -> Check:
    """Return a function that type-checks dashboards (their JSON texts by name) and returns the errors."""

    def check(boards: dict[str, str]) -> str:
        for file in ("plain.ts", "tsconfig.json"):
            shutil.copy2(HERE / file, tmp_path)
        if not (tmp_path / "node_modules").exists():
            (tmp_path / "node_modules").symlink_to(modules)
        for name, text in boards.items():
            source = f"import type {{ Board }} from './plain';\nexport const board: Board = {text};\n"
            (tmp_path / f"{name}.ts").write_text(source)
        command = ["node", modules / "typescript/bin/tsc", "-p", tmp_path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0 or done.stdout, done.stderr
        return done.stdout

    return check


def test_the_dashboards_conform_to_grafanas_types(check: Check) -> None:
    assert BOARDS
    assert check({name: (FOLDER / f"{name}.json").read_text() for name in BOARDS}) == ""


def test_the_type_check_finds_mistakes(check: Check) -> None:
    text = (FOLDER / "service.json").read_text()
    mistakes = {
        '"colorMode": "value"': '"colorMode": "rainbow"',
        '"overrides": []': '"override": []',
        '"h": 5': '"h": "5"',
        '"legendFormat": "good"': '"legendFormat": 3',
        '"iconColor": "blue"': '"iconColour": "blue"',
    }
    boards = {}
    for number, (right, wrong) in enumerate(mistakes.items()):
        assert right in text
        boards[f"wrong{number}"] = text.replace(right, wrong, 1)
    errors = check(boards)
    assert {f"wrong{number}.ts" for number in range(len(mistakes))} == set(re.findall(r"wrong\d\.ts", errors))
