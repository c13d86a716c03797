# SPDX-License-Identifier: Apache-2.0
"""Sessions: names by which clients mark requests that belong together, such as those of one conversation."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

SESSION_HEADER = b"x-mizzen-session"
AFFINITY_HEADER = b"x-session-affinity"
"""Header in which several clients, such as coding agents, send the name of their session."""
SESSION_HEADERS = (SESSION_HEADER, AFFINITY_HEADER)
"""Headers that may name the session, in the order of their precedence."""
MAX_SESSION_CHARACTERS = 64
"""Longest session name that is used unchanged; OpenAI has the same limit for `prompt_cache_key`."""


def get_session(headers: Iterable[tuple[bytes, bytes]], body_session: str) -> str:
    """Return a request's session, from one of `SESSION_HEADERS` or else from its body; empty if none has one.

    `body_session` must have been shortened by `bound_session`.
    """
    named = {name: value for name, value in headers if value and name in SESSION_HEADERS}
    for name in SESSION_HEADERS:
        if name in named:
            return bound_session(named[name].decode("latin-1"))
    return body_session


def bound_session(name: str) -> str:
    """Return a session name, or its digest if it is longer than `MAX_SESSION_CHARACTERS`.

    The digest is the same in every gateway. Names must be short, because the router hashes them on the event
    loop for each engine and each sequence.
    """
    if len(name) <= MAX_SESSION_CHARACTERS:
        return name
    return f"blake2b:{blake2b(name.encode(errors='replace'), digest_size=16).hexdigest()}"
