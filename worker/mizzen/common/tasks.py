"""Coroutines that live and die together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def together(*work: Coroutine[Any, Any, None]) -> None:
    """Run coroutines side by side; when one fails, end the others and raise its error."""
    tasks = [asyncio.create_task(one) for one in work]
    done: set[asyncio.Task[None]] = set()
    try:
        done |= (await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION))[0]
        any(map(asyncio.Task.result, done))
    finally:
        cancel(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()  # an error that a task has would refer to it, and wait for the garbage collector
        done.clear()


def cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks."""
    for task in tasks:
        task.cancel()
