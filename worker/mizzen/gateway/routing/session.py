"""What clients say of requests that belong together."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

SESSION_HEADER = b"x-mizzen-session"
MAX_SESSION_CHARACTERS = 64
"""Characters of a session that is known by its own name, as OpenAI bounds `prompt_cache_key`."""


def get_session(headers: Iterable[tuple[bytes, bytes]], hint: str) -> str:
    """Return a request's session: the header's, else the hint of its body; empty when it has none.

    `hint` is `bound_session` already.
    """
    for name, value in headers:
        if name == SESSION_HEADER and value:
            return bound_session(value.decode("latin-1"))
    return hint


def bound_session(name: str) -> str:
    """Return what a session is known by: its name, or the digest of a long one, the same in every gateway.

    Routing hashes it for each engine and each sequence, on the event loop: it has to be short there.
    """
    if len(name) <= MAX_SESSION_CHARACTERS:
        return name
    return f"blake2b:{blake2b(name.encode(errors='replace'), digest_size=16).hexdigest()}"
