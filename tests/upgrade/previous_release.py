# SPDX-License-Identifier: Apache-2.0
"""The programs of the release before this one, from the archive in this folder, to run beside today's."""

from __future__ import annotations

import os
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMIT = "7f4583b"
"""Commit of the previous release; before the first release, a commit with version 2 of the protocol."""
ARCHIVE = ROOT / "tests" / "upgrade" / f"mizzen-{COMMIT}.tar.xz"
MESSAGES = ROOT / "tests" / "upgrade" / f"messages-{COMMIT}.json"


@dataclass(frozen=True)
class Release:
    """A release's programs, which run in this Python environment with its packages of other projects."""

    name: str
    """`previous` or `current`."""
    root: Path
    """Folder with `worker`, `operator`, `charts` and `crds`."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the release's processes."""
        return {**os.environ, "PYTHONPATH": self.python_path, "OMP_NUM_THREADS": "1"}

    @property
    def python_path(self) -> str:
        """Value of PYTHONPATH with which `mizzen` and `mizzen_operator` are this release's."""
        return f"{self.root}/worker:{self.root}/operator"

    def command(self, module: str) -> list[str]:
        """Return the command that runs a module of the release."""
        return [sys.executable, "-P", "-m", module]


CURRENT = Release("current", ROOT)


def unpack_previous(folder: Path, archive: Path = ARCHIVE) -> Release:
    """Unpack the archive of the previous release into a folder, and return the release."""
    with tarfile.open(archive) as programs:
        programs.extractall(folder, filter="data")
    return Release("previous", folder)
