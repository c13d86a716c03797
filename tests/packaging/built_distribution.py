# SPDX-License-Identifier: Apache-2.0
"""Builds distributions of a tree, and runs code with a wheel instead of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = ("crds", "charts", "examples", "models/demo")
SOURCES = ("crds", "charts", "examples", "models", "operator", "worker")
BUILD = "import sys, setuptools.build_meta as backend; getattr(backend, 'build_' + sys.argv[1])(sys.argv[2])"


@dataclass(frozen=True)
class Built:
    """A source distribution, and the wheels built from it and from the tree."""

    sdist: Path
    wheel: Path
    wheel_of_sdist: Path


def build(folder: Path, kind: str, target: Path) -> Path:
    """Build an sdist or a wheel of the tree in `folder`, without network, and return the file."""
    run = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(target)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (built,) = target.iterdir()
    return built


@dataclass(frozen=True)
class Installed:
    """The wheel's files in a folder on the module path, and an empty working directory."""

    site: Path
    empty: Path

    def run(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python code in the empty directory, so that no file of the repository can be found."""
        command = [sys.executable, "-c", code, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(self.site), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command,
            cwd=self.empty,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
