"""Waits for a condition of a real system."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 240.0


def eventually(check: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
    """Wait until `check` gives something true, and return it."""
    began = time.monotonic()
    while not (found := check()):
        if time.monotonic() > began + seconds:
            raise AssertionError(f"after {seconds:g} s still not: {what}")
        time.sleep(0.2)
    print(f"after {time.monotonic() - began:.1f} s: {what}", file=sys.stderr)
    return found
