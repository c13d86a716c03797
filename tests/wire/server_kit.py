"""The engine's socket: handshake, requests, streams, files, and what a gateway may not do."""

from __future__ import annotations

import numpy as np

from mizzen.core.outputs import Load

LOAD = Load(running=1, waiting=2, waiting_tokens=3, pages_total=4, pages_used=5, pages_cached=6)


def column(packed: bytes, kind: str = "<u4") -> list[int]:
    return np.frombuffer(packed, dtype=kind).tolist()
