"""Checksums of whole files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from mizzen.fetch.errors import Corrupt

_READ = 4 * 1024 * 1024


def sha256(path: Path, check: Callable[[], None] = lambda: None) -> str:
    """The digest of a file as `sha256:…`; `check` is called once in a while and may raise."""
    return "sha256:" + _hashed(path, hashlib.sha256(), check)


def verify(path: Path, name: str, size: int, digest: str, check: Callable[[], None] = lambda: None) -> str:
    """Check a file against what its server promised; returns its own sha256.

    Args:
        path: of the file.
        name: for messages.
        size: in bytes.
        digest: as of `Remote.digest`.
        check: called once in a while; may raise.

    Raises:
        Corrupt: size or digest differ.
    """
    there = path.stat().st_size
    if there != size:
        raise Corrupt(f"{name} has {there} bytes, {size} were promised")
    own = sha256(path, check)
    kind, _, wanted = digest.partition(":")
    if kind == "git":
        found = _hashed(path, hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False), check)
    elif kind == "md5":
        found = _hashed(path, hashlib.md5(usedforsecurity=False), check)
    else:
        found = own.partition(":")[2]
    if wanted and found != wanted:
        raise Corrupt(f"{name} has the checksum {kind}:{found}, {digest} was promised")
    return own


def _hashed(path: Path, state: hashlib._Hash, check: Callable[[], None]) -> str:
    with path.open("rb") as file:
        while block := file.read(_READ):
            check()
            state.update(block)
    return state.hexdigest()
