# SPDX-License-Identifier: Apache-2.0
"""Waits for conditions of a real system."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 240.0


def eventually(check: Callable[[], Any], expectation: str, seconds: float = PATIENCE_SECONDS) -> Any:
    """Wait until `check()` returns something true, and return that.

    Raises:
        AssertionError: `check()` was still false after `seconds`; the message names `expectation`.
    """
    began = time.monotonic()
    while not (value := check()):
        if time.monotonic() > began + seconds:
            raise AssertionError(f"after {seconds:g} s still not: {expectation}")
        time.sleep(0.2)
    print(f"after {time.monotonic() - began:.1f} s: {expectation}", file=sys.stderr)
    return value
