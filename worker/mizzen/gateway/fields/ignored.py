# SPDX-License-Identifier: Apache-2.0
"""Paths of a request's ignored fields, and the response header that tells the client about them."""

from __future__ import annotations

import re
from collections.abc import Iterable

IGNORED_HEADER = b"x-mizzen-ignored"
MAX_PATHS = 16
"""Maximum number of paths that are kept of a request; further ignored fields are not named."""
MAX_NAME_CHARACTERS = 48
"""Maximum length of the name of an unknown field; longer names are cut."""
MAX_HEADER_CHARACTERS = 1024
"""Maximum length of the header's value; paths that do not fit are left out."""
MORE = "..."
"""Last element of the header's value if it does not name all ignored fields."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


def safe_name(name: str) -> str:
    """Return a client's field name in a form that is safe in headers: cut, other characters as `_`."""
    return _UNSAFE.sub("_", name[:MAX_NAME_CHARACTERS]) or "_"


def collect_paths(*groups: Iterable[str]) -> tuple[str, ...]:
    """Return all paths without duplicates; of too many paths, `MORE` is the last element."""
    paths = tuple(dict.fromkeys(path for group in groups for path in group))
    return paths if len(paths) <= MAX_PATHS else (*paths[:MAX_PATHS], MORE)


def ignored_header(paths: Iterable[str]) -> bytes:
    """Return the value of the header `x-mizzen-ignored`, which separates the paths with commas."""
    value = ""
    for path in paths:
        longer = f"{value}, {path}" if value else path
        if len(longer) > MAX_HEADER_CHARACTERS:
            return f"{value}, {MORE}".encode("ascii")
        value = longer
    return value.encode("ascii")
