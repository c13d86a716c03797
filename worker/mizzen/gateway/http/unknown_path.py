# SPDX-License-Identifier: Apache-2.0
"""Error message for requests whose path no endpoint has."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_BASE = "/v1"
_MAX_PATH = 100
"""Maximum length of a path that is compared with the endpoints, in characters."""
_SIMILARITY = 0.8
"""Minimum similarity of a path and the endpoint that the message suggests, from 0 to 1."""


def describe_unknown_path(path: str, endpoints: Iterable[str]) -> str:
    """Return an error message for an unknown path, with the endpoint that the client probably means.

    If the base URL of a client lacks `/v1`, or contains it twice, all its paths are unknown.

    Args:
        path: path of the request.
        endpoints: paths of the endpoints.
    """
    message = f"there is no {path} here"
    if len(path) > _MAX_PATH:
        return message
    completed = _BASE + re.sub(r"^(/+v1(?=/|$))*", "", path).rstrip("/")
    known = [endpoint for endpoint in endpoints if endpoint.startswith(_BASE) and "{" not in endpoint]
    matches = difflib.get_close_matches(completed, known, 1, _SIMILARITY)
    return f"{message}; did you mean {matches[0]}?" if matches else message
