"""Sessions: the client's hints which requests belong together."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

SESSION_HEADER = b"x-mizzen-session"
MAX_SESSION_CHARACTERS = 64
"""Longest session that is used as is; OpenAI bounds `prompt_cache_key` alike."""


def get_session(headers: Iterable[tuple[bytes, bytes]], body_session: str) -> str:
    """Return a request's session: that of the header, else that of its body; empty if it has none.

    `body_session` must be bounded already (`bound_session`).
    """
    for name, value in headers:
        if name == SESSION_HEADER and value:
            return bound_session(value.decode("latin-1"))
    return body_session


def bound_session(name: str) -> str:
    """Return a session of bounded length: its name, or the digest of a long one, the same in every gateway.

    The router hashes it for each engine and each sequence on the event loop, so it must be short.
    """
    if len(name) <= MAX_SESSION_CHARACTERS:
        return name
    return f"blake2b:{blake2b(name.encode(errors='replace'), digest_size=16).hexdigest()}"
