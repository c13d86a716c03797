# SPDX-License-Identifier: Apache-2.0
"""Memory that the engine shares with a process that decodes images.

Each image has an anonymous file (memfd_create(2)) for its content. A process writes the pixels of one image
after the other to memory that it keeps, because new memory would cost a tenth of the time of an image; the
engine copies them. Images with more pixels have a file of their own. The sizes of the files are sealed,
because a process that shrinks a mapped file would make the engine fail with SIGBUS.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import sys
import tempfile

import numpy as np

from mizzen.core.images.types import Pixels

KEPT_PIXEL_BYTES = 16 << 20
"""Size of the memory for pixels that a process keeps."""


def share_content(content: bytes) -> int:
    """Return the descriptor of a file with this content, which cannot be changed."""
    descriptor = _create_file("mizzen-image")
    try:
        _write_all(descriptor, content)
        if sys.platform == "linux":
            _seal(descriptor, fcntl.F_SEAL_WRITE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def create_pixel_memory(size: int) -> int:
    """Return the descriptor of a file of `size` zeros, whose size cannot be changed."""
    descriptor = _create_file("mizzen-pixels")
    try:
        os.ftruncate(descriptor, size)
        if sys.platform == "linux":
            _seal(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_content(descriptor: int, size: int) -> bytes:
    """Return the first `size` bytes of a file."""
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as memory:
        return memory[:]


def map_pixels(descriptor: int, shape: tuple[int, int, int, int], *, writable: bool) -> Pixels:
    """Return pixels of `shape` in the memory of a file; the array keeps the memory alive."""
    populate = getattr(mmap, "MAP_POPULATE", 0)  # one call instead of many page faults
    return view_pixels(_map(descriptor, math.prod(shape), populate, writable=writable), shape)


def map_kept_pixels(descriptor: int, *, writable: bool) -> mmap.mmap:
    """Return the memory of a file of KEPT_PIXEL_BYTES, which is taken only when it is used."""
    return _map(descriptor, KEPT_PIXEL_BYTES, 0, writable=writable)


def view_pixels(memory: mmap.mmap, shape: tuple[int, int, int, int]) -> Pixels:
    """Return pixels of `shape` at the beginning of mapped memory."""
    return np.frombuffer(memory, np.uint8, math.prod(shape)).reshape(shape)


def _map(descriptor: int, size: int, flags: int, *, writable: bool) -> mmap.mmap:
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | flags, prot=protection)


def _create_file(name: str) -> int:
    if sys.platform == "linux":
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _seal(descriptor: int, seals: int) -> None:
    seals |= fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
