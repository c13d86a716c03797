# SPDX-License-Identifier: Apache-2.0
"""Runs the release scripts, each as a program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts/release"))  # the scripts import each other, as programs do
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_script() -> Run:
    """Return a function that runs a script of scripts/release and returns its result."""

    def run(name: str, *arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / "scripts/release" / name, *arguments]
        return subprocess.run(  # type: ignore[call-overload]
            command, capture_output=True, text=True, timeout=120, check=False, **options
        )

    return run
