"""What clients say of requests that belong together."""

from __future__ import annotations

from collections.abc import Iterable

HEADER = b"x-mizzen-session"


def session_of(headers: Iterable[tuple[bytes, bytes]], hint: str) -> str:
    """Return a request's session: the header's, else the hint of its body; empty when it has none.

    `hint` is the body's `prompt_cache_key`, or its `user`.
    """
    for name, value in headers:
        if name == HEADER and value:
            return value.decode("latin-1")
    return hint
