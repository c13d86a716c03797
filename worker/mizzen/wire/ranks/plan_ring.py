"""The plan channel inside a pod: a ring buffer in shared memory from rank 0 to the other ranks.

    header    number of bytes written; for each reader, the number of bytes read and whether it sleeps
    data      frames in a ring: a head (number, length, checksum) and a plan's bytes, padded to 8

A frame is not overwritten before every reader has read it. The end is a frame of its own. The checksum covers
head and bytes, so that no memory ordering is required: a reader that sees the counter before the frame finds
an older frame, or a part of it, with another number, and reads again.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import time
import zlib
from dataclasses import dataclass

import numpy as np

from mizzen.core.step_plan import StepPlan
from mizzen.wire.ranks.plan_encoding import MalformedPlan, decode_plan, encode_plan

CAPACITY = 8 << 20
"""Size of the ring in bytes: some hundred decode steps, or a prefill chunk of a million tokens."""
LINE = 8
"""Number of 8-byte counters in a cache line: no two processes write to the same line."""
SPIN_SECONDS = 50e-6
"""Time that a reader spins before it sleeps."""
REREAD_SECONDS = 0.05
FULL_SECONDS = 50e-6
HEAD = struct.Struct("<QQQ")
"""Head of a frame: its number (from 1), its length, and the checksum of both and of the content."""
END = b"MZPLEND1"
"""Content of the last frame."""


class PlanChannelStalled(RuntimeError):
    """A rank has stopped reading plans."""


@dataclass(frozen=True, slots=True)
class RingDescriptors:
    """File descriptors of a ring, for the processes that share it."""

    memory: int
    wake: tuple[int, ...]
    """One eventfd per reader."""

    @property
    def all(self) -> tuple[int, ...]:
        """Return every descriptor."""
        return (self.memory, *self.wake)

    def close(self) -> None:
        """Close the descriptors in this process."""
        for descriptor in self.all:
            os.close(descriptor)


def create_ring(readers: int, capacity: int = CAPACITY) -> RingDescriptors:
    """Create a ring for `readers` readers; the caller closes the handles."""
    memory = os.memfd_create("mizzen-plans")
    os.ftruncate(memory, header_bytes(readers) + capacity)
    return RingDescriptors(memory, tuple(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(readers)))


def header_bytes(readers: int) -> int:
    """Return the size of the header in bytes."""
    return 8 * LINE * (1 + readers)


class _RingMemory:
    """The shared memory as both ends map it."""

    def __init__(self, handles: RingDescriptors) -> None:
        self.readers = len(handles.wake)
        self.memory = mmap.mmap(handles.memory, 0)
        head = header_bytes(self.readers)
        self.capacity = len(self.memory) - head
        numbers = np.frombuffer(self.memory, np.uint64, head // 8)
        self.written = numbers[:1]
        self.read = numbers[LINE::LINE]
        self.sleeps = numbers[LINE + 1 :: LINE]
        self.data = memoryview(self.memory)[head:]

    def put(self, at: int, content: bytes) -> None:
        """Write bytes at a position of the stream, wrapping around the end."""
        at %= self.capacity
        first = min(len(content), self.capacity - at)
        self.data[at : at + first] = content[:first]
        self.data[: len(content) - first] = content[first:]

    def get(self, at: int, size: int) -> bytes:
        """Read bytes at a position of the stream, wrapping around the end."""
        at %= self.capacity
        first = min(size, self.capacity - at)
        return bytes(self.data[at : at + first]) + bytes(self.data[: size - first])


def frame_size(size: int) -> int:
    """Return the size in bytes of a frame with `size` bytes of content."""
    return HEAD.size + -(-size // 8) * 8


def frame_checksum(number: int, content: bytes) -> int:
    """Return the CRC-32 over a frame's number, length and content."""
    return zlib.crc32(content, zlib.crc32(struct.pack("<QQ", number, len(content))))


class RingWriter:
    """Rank 0's end. Call `send` and `end` from one thread."""

    def __init__(self, handles: RingDescriptors, timeout_seconds: float = 10.0) -> None:
        self._ring = _RingMemory(handles)
        self._wake = handles.wake
        self._timeout = timeout_seconds
        self._at = 0
        self._number = 0

    def send(self, plan: StepPlan) -> None:
        """Send a plan to all readers; wait while the ring is full.

        Raises:
            PlanChannelStalled: a reader did not make room in time.
            ValueError: the plan is larger than the ring.
        """
        self._write(encode_plan(plan))

    def end(self) -> None:
        """Send the end of the stream, unless a reader has stalled."""
        try:
            self._write(END)
        except PlanChannelStalled:
            pass

    def _write(self, content: bytes) -> None:
        ring, size = self._ring, frame_size(len(content))
        if size > ring.capacity:
            raise ValueError(
                f"a step's plan has {len(content)} bytes, more than the {ring.capacity} that ranks share: "
                "lower --prefill-chunk-tokens"
            )
        deadline = time.monotonic() + self._timeout
        while self._at + size - int(ring.read.min()) > ring.capacity:
            if time.monotonic() > deadline:
                late = 1 + int(ring.read.argmin())
                raise PlanChannelStalled(f"rank {late} has taken no plan for {self._timeout:g} s")
            time.sleep(FULL_SECONDS)
        self._number += 1
        head = HEAD.pack(self._number, len(content), frame_checksum(self._number, content))
        ring.put(self._at, head + content)
        self._at += size
        ring.written[0] = self._at
        # Copy first: readers write concurrently, and `nonzero` counts before it collects.
        for reader in ring.sleeps.copy().nonzero()[0].tolist():
            os.eventfd_write(self._wake[reader], 1)


class RingReader:
    """The end of a rank other than 0. Used from one thread."""

    def __init__(self, handles: RingDescriptors, reader: int) -> None:
        """Open the ring as reader number `reader` (rank - 1)."""
        self._ring = _RingMemory(handles)
        self._reader = reader
        self._wake = handles.wake[reader]
        self._at = 0
        self._number = 1
        """Number of the next frame."""
        self.ended = False
        """Whether the end of the stream was received."""

    def receive(self, seconds: float) -> StepPlan | None:
        """Return the next plan, or None if none arrived within `seconds` or the stream has ended.

        Raises:
            MalformedPlan: the frame is not a plan.
        """
        if self.ended or not self._wait(seconds):
            return None
        content = self._read()
        plan = None if content == END else decode_plan(content)
        self._at += frame_size(len(content))
        self._number += 1
        self._ring.read[self._reader] = self._at
        self.ended = plan is None
        return plan

    def _wait(self, seconds: float) -> bool:
        ring = self._ring
        end = time.monotonic() + min(seconds, SPIN_SECONDS)
        while int(ring.written[0]) == self._at:
            if time.monotonic() > end:
                return self._sleep(seconds)
        return True

    def _sleep(self, seconds: float) -> bool:
        ring = self._ring
        ring.sleeps[self._reader] = 1
        try:
            # Later writes wake this reader; earlier ones are visible in `written`.
            if int(ring.written[0]) == self._at:
                select.select([self._wake], [], [], seconds)
        finally:
            ring.sleeps[self._reader] = 0
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        return int(ring.written[0]) != self._at

    def _read(self) -> bytes:
        """Return the content of the next frame, which may become visible slightly after the counter.

        Raises:
            MalformedPlan: the frame does not become valid in time.
        """
        deadline = time.monotonic() + REREAD_SECONDS
        while (content := self._peek_frame()) is None:
            if time.monotonic() > deadline:
                raise MalformedPlan(f"frame {self._number} is damaged")
        return content

    def _peek_frame(self) -> bytes | None:
        """Return the content of the next frame, or None while an older or partial frame is visible."""
        number, size, check = HEAD.unpack(self._ring.get(self._at, HEAD.size))
        if number != self._number or frame_size(size) > self._ring.capacity:
            return None
        content = self._ring.get(self._at + HEAD.size, size)
        return content if frame_checksum(number, content) == check else None
