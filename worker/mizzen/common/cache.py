"""Folder in which Mizzen caches files on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder: `$MIZZEN_CACHE_DIR`, or `mizzen` in the user's cache folder."""
    if chosen := os.environ.get("MIZZEN_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mizzen"
