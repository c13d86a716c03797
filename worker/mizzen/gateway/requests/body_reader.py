# SPDX-License-Identifier: Apache-2.0
"""Parse large request bodies off the event loop, without holding the GIL for long at a time.

A call of the JSON decoder, or any call that processes a whole list, holds the GIL until it returns. Lists and
objects take the longest to create, so their number per body is limited. Long lists and bodies are checked in
pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.types import Scope

from mizzen.gateway.admission.fair_mutex import FairMutex
from mizzen.gateway.auth.authentication import get_tenant_name
from mizzen.gateway.errors import invalid

SMALL_BYTES = 64 * 1024
"""Largest body that is parsed on the event loop."""
MAX_CONTAINERS = 100_000
"""Maximum number of lists and objects in a body larger than `SMALL_BYTES`."""
PIECE_ITEMS = 32_768
"""Number of list items that are processed at a time, which takes about a millisecond."""
PIECE_BYTES = 65_536
"""Number of bytes of a body that are processed at a time, which takes about a millisecond."""

QUOTE, BACKSLASH, BRACKET, BRACE = b'"\\[{'

Bytes: TypeAlias = "NDArray[np.uint8]"
Bools: TypeAlias = "NDArray[np.bool_]"
R = TypeVar("R")
T = TypeVar("T")


class BodyReader:
    """Reader of request bodies; parses large ones in a thread, one at a time, round-robin across tenants."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "mizzen-body")
        self._mutex = FairMutex()

    async def parse_body(self, body: bytes, parse: Callable[[bytes], R], scope: Scope) -> R:
        """Return the result of `parse` for a body; `parse` runs in the thread if the body is large.

        Raises:
            ApiError: raised by `parse`, or 400 if a large body has too many lists and objects.
        """
        if len(body) <= SMALL_BYTES:
            return parse(body)

        def work() -> R:
            check_containers(body)
            return parse(body)

        return await self._run_in_pool(work, get_tenant_name(scope))

    async def _run_in_pool(self, work: Callable[[], R], group: str) -> R:
        """Run `work` in the thread while holding the mutex, which groups (tenants) acquire in turn.

        The mutex is released only when `work` ends, even if the request is cancelled earlier.
        """
        await self._mutex.acquire(group)
        loop = asyncio.get_running_loop()

        def end() -> None:
            with suppress(RuntimeError):  # the loop is closed, so no request waits for the mutex
                loop.call_soon_threadsafe(self._mutex.release, group)

        try:
            running = self._pool.submit(work)
        except RuntimeError:  # the gateway has shut down
            self._mutex.release(group)
            raise
        running.add_done_callback(lambda _: end())
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Shut down the thread; bodies that wait for it are not parsed."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def check_containers(body: bytes, limit: int = MAX_CONTAINERS, piece_bytes: int = PIECE_BYTES) -> None:
    """Check that JSON text has at most `limit` lists and objects; brackets in strings do not count.

    The text is processed in pieces of `piece_bytes`.

    Raises:
        ApiError: 400 if the text has more than `limit` lists and objects.
    """
    if body.count(b"[") + body.count(b"{") <= limit:
        return
    count, in_string, backslashes_before = 0, 0, 0
    for begin in range(0, len(body), piece_bytes):
        part = np.frombuffer(body, np.uint8, min(piece_bytes, len(body) - begin), begin)
        quotes, backslashes_before = find_quotes(part, backslashes_before)
        inside = (
            np.cumsum(quotes, dtype=np.uint8) + np.uint8(in_string)
        ) & 1  # uint8 wraps at 256, which keeps the parity
        in_string = int(inside[-1])
        count += int(np.count_nonzero(((part == BRACKET) | (part == BRACE)) & (inside == 0)))
        if count > limit:
            text = f"the body holds more than {limit} lists and objects: send several requests"
            raise invalid(text, code="body_too_complex")


def find_quotes(part: Bytes, backslashes_before: int) -> tuple[Bools, int]:
    """Find the unescaped quotes in a part (uint8 [n]) of JSON text.

    `backslashes_before` is the number of consecutive backslashes right before the part. Return a mask of the
    quotes (bool [n]), and the number of consecutive backslashes right before the next part.
    """
    quotes, backslashes = part == QUOTE, part == BACKSLASH
    if not backslashes_before and not backslashes.any():
        return quotes, 0
    positions = np.arange(1, len(part) + 1)
    # Position of the last byte that is not a backslash, up to each byte.
    last = np.maximum.accumulate(np.where(backslashes, -backslashes_before, positions))
    runs = np.concatenate(([backslashes_before], positions - last))
    return quotes & (runs[:-1] % 2 == 0), int(runs[-1])


def split_pieces(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield a sequence in pieces of at most `PIECE_ITEMS` items."""
    for begin in range(0, len(values), PIECE_ITEMS):
        yield values[begin : begin + PIECE_ITEMS]
