"""Large bodies are read beside the event loop, in pieces that other threads can come between.

A call into the decoder or over all of a list holds the interpreter for as long as it takes. So bodies have a
bound on their lists and objects, whose making takes longest, and token ids are looked at in pieces.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mizzen.gateway.errors import invalid

SMALL_BYTES = 64 * 1024
"""A body up to this long is read at once."""
MAX_CONTAINERS = 100_000
"""Lists and objects of one body."""
PIECE = 32_768
"""Items of a list that are looked at in one go: about a millisecond."""

STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

R = TypeVar("R")
T = TypeVar("T")


class BodyReader:
    """Reads bodies, the large ones one at a time in a thread of its own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "mizzen-body")

    async def read(self, body: bytes, parse: Callable[[bytes], R]) -> R:
        """Return what `parse` makes of a body.

        Raises:
            ApiError: what `parse` raises; 400 for a body of too many lists and objects.
        """
        if len(body) <= SMALL_BYTES:
            return parse(body)

        def work() -> R:
            check_containers(body)
            return parse(body)

        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Take nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def check_containers(body: bytes, most: int = MAX_CONTAINERS) -> None:
    """Raise when JSON text has too many lists and objects; brackets in strings do not count.

    Raises:
        ApiError: 400.
    """
    if brackets(body, 0, len(body)) <= most:
        return
    found, place = 0, 0
    for string in STRING.finditer(body):
        found += brackets(body, place, string.start())
        place = string.end()
        if found > most:
            break
    if found + brackets(body, place, len(body)) > most:
        text = f"the body holds more than {most} lists and objects: send several requests"
        raise invalid(text, code="body_too_complex")


def brackets(body: bytes, begin: int, end: int) -> int:
    """Return how many lists and objects begin in a part of JSON text that is in no string."""
    return body.count(b"[", begin, end) + body.count(b"{", begin, end)


def pieces(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield a sequence in pieces."""
    for begin in range(0, len(values), PIECE):
        yield values[begin : begin + PIECE]
