# SPDX-License-Identifier: Apache-2.0
"""Rules and files for tests of the image decoder.

The rules run code of a test inside the confined process, which calls `drawings` for every image.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from mizzen.images.types import ImageDrawing, ImageGeometry, PixelLimits, PixelNormalization

FACTOR = 28
LEAKED: list[bytes] = []
"""Memory that the action `leak` never frees."""
NORMALIZATION = PixelNormalization(1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@dataclass(frozen=True, slots=True)
class ProbeRules:
    """Rules that round sizes to multiples of FACTOR, and run an action in the process that decodes."""

    action: str = "none"
    placeholder: str = "<image>"
    placeholder_id: int = 0
    rotary_merge: int = 0
    pixel_bounds: tuple[int, int] | None = None
    normalization: PixelNormalization = NORMALIZATION

    def geometry(self, width: int, height: int, limits: PixelLimits | None = None) -> ImageGeometry:
        """Return the sizes."""
        rows, columns = max(1, round(height / FACTOR)), max(1, round(width / FACTOR))
        return ImageGeometry(1, rows * FACTOR, columns * FACTOR, (1, rows, columns), rows * columns)

    def drawings(
        self, width: int, height: int, limits: PixelLimits | None = None
    ) -> tuple[ImageDrawing, ...]:
        """Run the action, which may depend on the width, and return the resizing."""
        run_action(self.action, width)
        geometry = self.geometry(width, height)
        size = geometry.width, geometry.height
        return (ImageDrawing(size, Image.Resampling.BICUBIC, (0, 0), size, size),)

    def expansion(self, geometry: ImageGeometry) -> np.ndarray:
        """Return one token for each embedding."""
        return np.zeros(geometry.embeddings, np.int32)

    def fingerprint(self) -> bytes:
        """Return the action's name."""
        return self.action.encode()


def run_action(action: str, width: int) -> None:
    """Run an action in the confined process."""
    if action == "hang_if_wide" and width > 500:
        while True:
            time.monotonic()
    elif action == "sleep":
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            pass
    elif action == "crash_if_wide" and width > 500:
        os._exit(3)
    elif action in FORBIDDEN:
        try:
            FORBIDDEN[action]()
        except PermissionError:
            return
        os._exit(4)  # the call was allowed
    elif action == "allocate":
        bytearray(1 << 40)
    elif action == "leak":
        LEAKED.append(b"x" * (2 << 20))


def become_traced() -> None:
    """Let the parent trace this process (ptrace(2), PTRACE_TRACEME)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "ptrace")


def map_executable_memory() -> None:
    """Map memory that can be executed."""
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)


FORBIDDEN = {
    "socket": socket.socket,
    "unix_socket": socket.socketpair,
    "read_file": lambda: Path("/etc/passwd").read_bytes(),
    "write_file": lambda: Path(os.devnull).write_bytes(b"x"),
    "fork": os.fork,
    "execute": lambda: os.execv("/bin/true", ["true"]),
    "spawn": lambda: subprocess.run([sys.executable, "-P", "-c", ""], check=True),
    "kill_parent": lambda: os.kill(os.getppid(), signal.SIGURG),
    "trace": become_traced,
    "executable_memory": map_executable_memory,
}
"""Actions that the process must not be able to perform."""


def encode_image(width: int, height: int, kind: str = "JPEG", seed: int = 0, **options: object) -> bytes:
    """Return the file of an image with smooth random content."""
    small = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(file, kind, **options)
    return file.getvalue()
