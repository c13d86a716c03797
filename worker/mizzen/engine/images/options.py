# SPDX-License-Identifier: Apache-2.0
"""Limits on the processes that decode images."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


def default_processes() -> int:
    """Return the number of processes that decode images: half of the CPUs, from 1 to 4."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOptions:
    """Limits on the decoding of images."""

    processes: int = field(default_factory=default_processes)
    """Maximum number of processes."""
    image_seconds: float = 5.0
    """Maximum wall time to decode and resize an image, in seconds; the process is then killed."""
    queue_seconds: float = 30.0
    """Maximum time that an image waits for a process, in seconds."""
    max_waiting: int = 256
    """Maximum number of images that wait or are being decoded."""
    max_waiting_bytes: int = 256 << 20
    """Maximum size in bytes of the files of these images together."""
    pixels_in_work: int = 64_000_000
    """Number of pixels, before resizing, up to which images are decoded at the same time."""
    memory_bytes: int = 2 << 30
    """Maximum memory in bytes that a process may use in addition to its memory after the start."""
    process_images: int = 10_000
    """Number of images after which a process is replaced, so that no state of it lasts."""
    grown_bytes: int = 256 << 20
    """Growth of a process's memory in bytes, between images, after which it is replaced."""
    idle_seconds: float = 600.0
    """Time without images, in seconds, after which the processes are stopped."""
    start_seconds: float = 60.0
    """Maximum time for a process to start, in seconds."""
    retry_seconds: float = 1.0
    """Time between two attempts to start a process after a failed start, in seconds."""
