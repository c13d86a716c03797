# SPDX-License-Identifier: Apache-2.0
"""Run groups of coroutines that fail together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def run_together(*work: Coroutine[Any, Any, None]) -> None:
    """Run coroutines concurrently; if one fails, cancel the others and raise its error."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    done: set[asyncio.Task[None]] = set()
    try:
        done |= (await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION))[0]
        any(map(asyncio.Task.result, done))
    finally:
        cancel(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)
        # A failed task's traceback refers to this list. Break the cycle, so that no garbage collection is
        # needed to free them.
        tasks.clear()
        done.clear()


def cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks without waiting for their end."""
    for task in tasks:
        task.cancel()
