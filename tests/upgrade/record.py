# SPDX-License-Identifier: Apache-2.0
"""Record a release for the tests of upgrades: its programs, and the bytes of all messages that it sends.

    python tests/upgrade/record.py COMMIT

Run this for the commit of each release once it is published, set `COMMIT` in `previous_release.py`, and
delete the files of the release before.
"""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import tempfile
from pathlib import Path

from previous_codec import run_codec
from previous_release import ROOT, unpack_previous

PATHS = ("worker/mizzen", "operator/mizzen_operator", "charts/mizzen", "crds")
LEFT_OUT = ("worker/mizzen/kernels/**/*.cu", "worker/mizzen/offline", "charts/mizzen/dashboards")
"""Files that the tests do not need: sources of GPU kernels, offline inference, and dashboards."""


def main() -> None:
    """Write the archive and the file of messages of a commit."""
    (commit,) = sys.argv[1:]
    excluded = [f":(exclude,glob){path}" for path in LEFT_OUT]
    command = ["git", "archive", commit, *PATHS, *excluded]
    content = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    folder = Path(__file__).parent
    archive = folder / f"mizzen-{commit}.tar.xz"
    archive.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    with tempfile.TemporaryDirectory() as unpacked:
        recorded = run_codec(unpack_previous(Path(unpacked), archive), [])
    del recorded["decoded"]
    text = json.dumps(recorded, indent=1, sort_keys=True) + "\n"
    (folder / f"messages-{commit}.json").write_text(text)


if __name__ == "__main__":
    main()
