# SPDX-License-Identifier: Apache-2.0
"""The folder in which Mizzen caches files on this machine, and the way they are written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder: `$MIZZEN_CACHE_DIR`, or `mizzen` in the user's cache folder."""
    if chosen := os.environ.get("MIZZEN_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mizzen"


def write_atomically(path: Path, content: bytes, *, shared: bool = False) -> None:
    """Write a file completely or not at all, even if other processes write it concurrently.

    Args:
        path: The file; its folder is created if necessary.
        content: The content of the file.
        shared: Whether all users may read the file; otherwise only the current user may.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(mode=0o777 if shared else 0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            if shared:
                os.fchmod(handle, 0o644)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
