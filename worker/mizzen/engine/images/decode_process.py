# SPDX-License-Identifier: Apache-2.0
"""The engine's side of a process that decodes images.

`DecodePool` uses it from its thread. `mizzen.engine.images.decode_worker` is the process.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from typing import TypeVar

import msgspec

from mizzen.common.child_process import SINGLE_THREADED
from mizzen.core.images.types import Pixels
from mizzen.engine.images.buffers import (
    KEPT_PIXEL_BYTES,
    create_pixel_memory,
    map_kept_pixels,
    map_pixels,
    share_content,
    view_pixels,
)
from mizzen.engine.images.messages import MESSAGE_BYTES, DecodeReady, DecodeReply
from mizzen.engine.images.options import DecoderOptions
from mizzen.engine.images.tasks import DecodeTask

KEPT_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
"""Environment variables that the process inherits, because Python may need them to find its modules."""
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
"""Variables of glibc: the process keeps up to 64 MiB of freed memory for the next image, because page faults
would take a third of the time of an image."""
MessageT = TypeVar("MessageT", DecodeReady, DecodeReply)
MEMORY_CHECK_IMAGES = 32
"""Number of images after which the memory of a process is measured again."""
EXIT_SECONDS = 1.0
"""Time to wait for a killed process, in seconds."""


class ProcessEnded(Exception):
    """The process has ended, or has sent something other than a reply."""


class DecodeProcess:
    """A process that decodes one image at a time by one model's rules; used from one thread."""

    def __init__(self, rules: bytes, options: DecoderOptions) -> None:
        """Start the process without waiting for it.

        Args:
            rules: Pickled rules of the model.
            options: Limits.

        Raises:
            OSError: the process cannot be started.
        """
        self.rules = rules
        self.ready: DecodeReady | None = None
        """Message that ended the start of the process; None while it is starting."""
        self.task: DecodeTask | None = None
        """Image that is being decoded."""
        self.deadline = time.monotonic() + options.start_seconds
        """Time of `time.monotonic` at which the start or the current image has taken too long."""
        self.task_start = 0.0
        """Time of `time.monotonic` at which the current image was sent."""
        self._pixel_file = -1
        """File for the pixels of the current image; -1 if they fit into the kept memory."""
        self.worn = False
        """Whether the process should be replaced: after many images, or because its memory has grown."""
        self._images = 0
        """Number of images that the process has finished."""
        self._first_bytes = 0
        """Memory of the process when it was ready, in bytes."""
        self._options = options
        kept_file = create_pixel_memory(KEPT_PIXEL_BYTES)
        try:
            self._kept_pixels = map_kept_pixels(kept_file, writable=False)
            self._start(rules, kept_file)
        finally:
            os.close(kept_file)

    def _start(self, rules: bytes, kept_file: int) -> None:
        options = self._options
        self.control, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        with worker_end:
            words = ["--fd", str(worker_end.fileno()), "--parent", str(os.getpid())]
            words += ["--memory-bytes", str(options.memory_bytes), "--pixels", str(kept_file)]
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "mizzen.engine.images.decode_worker", *words],
                    pass_fds=(worker_end.fileno(), kept_file),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_environment(),
                )
            except BaseException:
                self.control.close()
                raise
        self.process_id = self._process.pid
        self.control.send(rules)

    @property
    def idle(self) -> bool:
        """Whether the process can receive an image."""
        return self.ready is not None and self.task is None

    def send(self, task: DecodeTask) -> None:
        """Let the idle process decode an image.

        Raises:
            ProcessEnded: the process ended before; the image has not been read.
            OSError: there is no memory for the image.
        """
        files = [share_content(task.content)]
        try:
            if task.job.pixel_bytes > KEPT_PIXEL_BYTES:
                self._pixel_file = create_pixel_memory(task.job.pixel_bytes)
                files.append(self._pixel_file)
            socket.send_fds(self.control, [msgspec.json.encode(task.job)], files)
        except (BrokenPipeError, ConnectionResetError):
            raise ProcessEnded from None
        finally:
            os.close(files[0])
        self.task = task
        self.task_start = time.monotonic()
        self.deadline = self.task_start + self._options.image_seconds

    def receive_ready(self) -> DecodeReady | None:
        """Return the message that ends the start of the process, or None while it is starting.

        Raises:
            ProcessEnded: the process has ended or cannot work; the error contains the reason.
        """
        message = self._receive()
        if message is None:
            return None
        ready = _decode(message, DecodeReady)
        if ready.fault:
            raise ProcessEnded(ready.fault)
        self.ready = ready
        self._first_bytes = _resident_bytes(self.process_id)
        return ready

    def receive_pixels(self) -> tuple[Pixels | None, str] | None:
        """Return the pixels of the current image or an error message, or None if the image is not finished.

        The pixels are a copy, which the process cannot change. The process is idle afterwards.

        Raises:
            ProcessEnded: the process has ended.
            OSError: there is no memory for the pixels.
        """
        message = self._receive()
        task = self.task
        if message is None:
            return None
        if task is None:
            raise ProcessEnded("sent a reply without a job")
        reply = _decode(message, DecodeReply)
        pixels = None
        if not reply.error:
            shape = task.job.shape
            if self._pixel_file < 0:
                pixels = view_pixels(self._kept_pixels, shape).copy()
            else:
                pixels = map_pixels(self._pixel_file, shape, writable=False).copy()
        self._images += 1
        self.worn = self._is_worn()
        self._finish_task()
        return pixels, reply.error

    def _is_worn(self) -> bool:
        if self.worn or self._images >= self._options.process_images:
            return True
        if self._images % MEMORY_CHECK_IMAGES:
            return False
        return _resident_bytes(self.process_id) - self._first_bytes > self._options.grown_bytes

    def kill(self) -> None:
        """Kill the process, and wait for a short time until it has ended."""
        self.control.close()
        self._process.kill()
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            pass  # the kernel ends it later
        self._finish_task()

    def _finish_task(self) -> None:
        self.task = None
        if self._pixel_file >= 0:
            os.close(self._pixel_file)
            self._pixel_file = -1

    def _receive(self) -> bytes | None:
        try:
            message = self.control.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return None
        except ConnectionError:
            raise ProcessEnded("ended") from None
        if not message:
            raise ProcessEnded("ended")
        return message


def _environment() -> dict[str, str]:
    """Return the environment of the process, which contains no secrets of the engine."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return {**kept, **SINGLE_THREADED, **KEEP_FREED_MEMORY, "PYTHONDONTWRITEBYTECODE": "1"}


def _resident_bytes(process_id: int) -> int:
    """Return the memory of a process in bytes without its shared memory; 0 if it is unknown."""
    try:
        with open(f"/proc/{process_id}/statm") as file:
            resident, shared = map(int, file.read().split()[1:3])
    except (OSError, ValueError):
        return 0
    return (resident - shared) * resource.getpagesize()


def _decode(message: bytes, kind: type[MessageT]) -> MessageT:
    try:
        return msgspec.json.decode(message, type=kind)
    except msgspec.MsgspecError:
        raise ProcessEnded("sent an unknown message") from None
