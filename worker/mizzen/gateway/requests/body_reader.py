"""Large bodies are read beside the event loop, in pieces that other threads can come between.

A call into the decoder or over all of a list holds the interpreter for as long as it takes. So bodies have a
bound on their lists and objects, whose making takes longest, and what is counted or checked is looked at in
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
from mizzen.gateway.auth.authentication import get_tenant
from mizzen.gateway.errors import invalid

SMALL_BYTES = 64 * 1024
"""A body up to this long is read at once."""
MAX_CONTAINERS = 100_000
"""Lists and objects of one body."""
PIECE_ITEMS = 32_768
"""Items of a list that are looked at in one go: about a millisecond."""
PIECE_BYTES = 65_536
"""Of a body that are looked at in one go: about a millisecond too."""

QUOTE, BACKSLASH, BRACKET, BRACE = b'"\\[{'

Bytes: TypeAlias = "NDArray[np.uint8]"
Bools: TypeAlias = "NDArray[np.bool_]"
R = TypeVar("R")
T = TypeVar("T")


class BodyReader:
    """Reads bodies, the large ones one at a time in a thread of its own; tenants take turns at it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "mizzen-body")
        self._mutex = FairMutex()

    async def parse_body(self, body: bytes, parse: Callable[[bytes], R], scope: Scope) -> R:
        """Return what `parse` makes of the body of a request.

        Raises:
            ApiError: what `parse` raises; 400 for a body of too many lists and objects.
        """
        if len(body) <= SMALL_BYTES:
            return parse(body)

        def work() -> R:
            check_containers(body)
            return parse(body)

        tenant = get_tenant(scope)
        return await self._run_in_pool(work, "" if tenant is None else tenant.name)

    async def _run_in_pool(self, work: Callable[[], R], group: str) -> R:
        """Return what the work gives. Its turn ends with the work, which a request that goes does not end."""
        await self._mutex.acquire(group)
        loop = asyncio.get_running_loop()

        def end() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._mutex.release, group)

        try:
            running = self._pool.submit(work)
        except RuntimeError:  # the gateway has ended
            self._mutex.release(group)
            raise
        running.add_done_callback(lambda _: end())
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Take nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def check_containers(body: bytes, most: int = MAX_CONTAINERS, piece: int = PIECE_BYTES) -> None:
    """Raise when JSON text has too many lists and objects; brackets in strings do not count.

    It is looked at in pieces of so many bytes.

    Raises:
        ApiError: 400.
    """
    if body.count(b"[") + body.count(b"{") <= most:
        return
    found, in_string, run = 0, 0, 0
    for begin in range(0, len(body), piece):
        part = np.frombuffer(body, np.uint8, min(piece, len(body) - begin), begin)
        quotes, run = find_quotes(part, run)
        inside = (np.cumsum(quotes, dtype=np.uint8) + np.uint8(in_string)) & 1  # it wraps at an even number
        in_string = int(inside[-1])
        found += int(np.count_nonzero(((part == BRACKET) | (part == BRACE)) & (inside == 0)))
        if found > most:
            text = f"the body holds more than {most} lists and objects: send several requests"
            raise invalid(text, code="body_too_complex")


def find_quotes(part: Bytes, run: int) -> tuple[Bools, int]:
    """Return where strings begin or end in a part of JSON text: at quotes that no backslash escapes.

    `run` says how many backslashes stand before the part; the other value is that of the next part.
    """
    quotes, backslashes = part == QUOTE, part == BACKSLASH
    if not run and not backslashes.any():
        return quotes, 0
    places = np.arange(1, len(part) + 1)
    last = np.maximum.accumulate(np.where(backslashes, -run, places))  # that is none, up to each place
    runs = np.concatenate(([run], places - last))
    return quotes & (runs[:-1] % 2 == 0), int(runs[-1])


def split_pieces(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield a sequence in pieces."""
    for begin in range(0, len(values), PIECE_ITEMS):
        yield values[begin : begin + PIECE_ITEMS]
