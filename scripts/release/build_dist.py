# SPDX-License-Identifier: Apache-2.0
"""Build the wheel and the source distribution, and check their names and metadata.

    python -m pip install --requirement scripts/release/requirements.txt
    python scripts/release/build_dist.py dist/python

The wheel is built from the source distribution, so that both contain everything. Times in both are the time
of the commit, so that a second build gives the same bytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from set_version import ROOT, read_version


def build_dist(out: Path) -> list[Path]:
    """Build both distributions into a folder; return their paths.

    Raises:
        ValueError: the folder contains other files afterwards.
        subprocess.CalledProcessError: a build or check failed.
    """
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    epoch = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch}
    subprocess.run([sys.executable, "-m", "build", "--outdir", out, ROOT], check=True, env=environment)
    version = read_version()
    expected = {f"mizzen-{version}.tar.gz", f"mizzen-{version}-py3-none-any.whl"}
    found = sorted(out.iterdir())
    if {path.name for path in found} != expected:
        raise ValueError(f"{out} contains {', '.join(path.name for path in found)}, not {expected}")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *found], check=True)
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {Path(sys.argv[0]).name} FOLDER")
    try:
        build_dist(Path(sys.argv[1]))
    except (ValueError, subprocess.CalledProcessError) as failure:
        sys.exit(str(failure))
