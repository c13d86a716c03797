# SPDX-License-Identifier: Apache-2.0
"""Helpers to fill and read wire frames: a `Load` whose numbers all differ, and decoding of packed columns."""

from __future__ import annotations

import numpy as np

from mizzen.core.outputs import Load

LOAD = Load(running=1, waiting=2, waiting_tokens=3, pages_total=4, pages_used=5, pages_cached=6)


def column(packed: bytes, kind: str = "<u4") -> list[int]:
    """Return the numbers of a packed column, such as `Outputs.rids`; `kind` is their NumPy dtype."""
    return np.frombuffer(packed, dtype=kind).tolist()
