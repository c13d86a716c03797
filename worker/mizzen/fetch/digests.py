# SPDX-License-Identifier: Apache-2.0
"""Compute and verify the checksums of complete files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from mizzen.fetch.errors import CorruptDownload

_READ = 4 * 1024 * 1024


def sha256(path: Path, check: Callable[[], None] = lambda: None) -> str:
    """Return the SHA-256 of a file as `sha256:…`; `check` is called regularly and may raise to cancel."""
    return "sha256:" + _hash_file(path, hashlib.sha256(), check)


def verify(path: Path, name: str, size: int, digest: str, check: Callable[[], None] = lambda: None) -> str:
    """Verify a file's size and checksum, and return its SHA-256 as `sha256:…`.

    Args:
        path: path of the file.
        name: name of the file in messages.
        size: expected size in bytes.
        digest: expected digest, in the format of `RemoteFile.digest`; if empty, only the size is verified.
        check: called regularly; may raise to cancel the verification.

    Raises:
        CorruptDownload: the size or the digest differs.
    """
    actual_size = path.stat().st_size
    if actual_size != size:
        raise CorruptDownload(f"{name} has {actual_size} bytes, expected {size}")
    own = sha256(path, check)
    kind, _, wanted = digest.partition(":")
    if kind == "git":
        actual = _hash_file(path, hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False), check)
    elif kind == "md5":
        actual = _hash_file(path, hashlib.md5(usedforsecurity=False), check)
    else:
        actual = own.partition(":")[2]
    if wanted and actual != wanted:
        raise CorruptDownload(f"{name} has checksum {kind}:{actual}, expected {digest}")
    return own


def _hash_file(path: Path, state: hashlib._Hash, check: Callable[[], None]) -> str:
    with path.open("rb") as file:
        while block := file.read(_READ):
            check()
            state.update(block)
    return state.hexdigest()
