# SPDX-License-Identifier: Apache-2.0
"""Runs `load.py` in its own process, so that load and changes of services do not slow each other down."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOAD = Path(__file__).with_name("load.py")
END_SECONDS = 300.0
"""Time limit for the requests that are in flight when the load ends."""


class Driver:
    """A `load.py` process, and the counts that it has printed."""

    def __init__(
        self, plan: dict[str, Any], command: Sequence[str] = (sys.executable, str(LOAD), "-")
    ) -> None:
        """Prepare the process; `command` runs `load.py -` on this machine or, through kubectl, in a pod."""
        self._plan = plan
        self._command = command
        self.counts: dict[str, Any] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def started(self) -> int:
        """Number of requests sent so far."""
        return self.counts.get("started", 0)

    async def start(self) -> None:
        """Start the process, and wait until every question of the plan has been answered twice.

        Raises:
            AssertionError: the process ended before that; it prints the reason to standard error.
        """
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 22
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(self._plan).encode() + b"\n")
        try:
            line = await self._process.stdout.readline()
        except BaseException:
            await self.kill()
            raise
        if line != b"started\n":
            raise AssertionError("the load did not start")
        self._reading = asyncio.create_task(self._read(self._process.stdout))

    async def _read(self, output: asyncio.StreamReader) -> None:
        async for line in output:
            self.counts = json.loads(line)

    async def end(self) -> dict[str, Any]:
        """Stop sending requests, wait for those in flight, and return the final counts."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._reading is not None
        self._process.stdin.close()
        async with asyncio.timeout(END_SECONDS):
            await self._reading
            await self._process.wait()
        return self.counts

    async def kill(self) -> None:
        """Kill the process if it still runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            self._reading.cancel()
