# SPDX-License-Identifier: Apache-2.0
"""Queue of received signals. A loop can wait for them without races, and signal handlers do no work."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType, TracebackType
from typing import Any


class SignalQueue:
    """Context manager, for the main thread, that queues signals and restores the previous handlers on
    exit."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers
        self._previous_handlers: dict[int, Any] = {}
        self._read, self._write = -1, -1

    def __enter__(self) -> SignalQueue:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self._numbers:
            self._previous_handlers[number] = signal.signal(number, _ignore)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def wait(self, seconds: float) -> list[int]:
        """Return the numbers of the received signals; wait at most `seconds` for the first one."""
        select.select([self._read], [], [], seconds)
        try:
            return list(os.read(self._read, 4096))
        except BlockingIOError:
            return []


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing; unlike SIG_IGN, this lets Python write the signal to the wakeup descriptor."""
