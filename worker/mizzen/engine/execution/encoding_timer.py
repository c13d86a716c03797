# SPDX-License-Identifier: Apache-2.0
"""Measures how long the image encoder runs, without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class EncodingTimer:
    """Sum of the times between the begin and the end of blocks, on the device that runs their operations.

    On a GPU, the times are those between two events in the current stream; blocks that it has not finished
    are not counted yet. There, all methods are called from one thread. On CPU, `seconds` may be read from
    another thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        """Events at the begin and at the end of blocks, the oldest first; only steps in flight have blocks
        that the device has not finished."""

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time of the operations in a block."""
        if not self._cuda:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        self._collect()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._running.append((begin, end))

    @property
    def seconds(self) -> float:
        """Sum of the times of finished blocks, in seconds, since the last `reset`."""
        self._collect()
        return self._seconds

    def reset(self) -> None:
        """Begin to count again; blocks that run are dropped."""
        self._running.clear()
        self._seconds = 0.0

    def _collect(self) -> None:
        while self._running and self._running[0][1].query():
            begin, end = self._running.popleft()
            self._seconds += begin.elapsed_time(end) / 1000
