# SPDX-License-Identifier: Apache-2.0
"""Memory that the engine shares with a process that decodes images.

Each image has two anonymous files (memfd_create(2)), one for the content and one for the pixels. Their sizes
are sealed, because a process that shrinks a mapped file would make the engine fail with SIGBUS.
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
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # one call instead of many page faults
    memory = mmap.mmap(descriptor, math.prod(shape), flags=flags, prot=protection)
    return np.frombuffer(memory, np.uint8).reshape(shape)


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
