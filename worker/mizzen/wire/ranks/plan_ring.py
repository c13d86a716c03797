# SPDX-License-Identifier: Apache-2.0
"""The plan channel inside a pod: a ring buffer in shared memory from rank 0 to the other ranks.

    header    number of bytes written; for each reader, the number of bytes read and whether it sleeps
    data      ring of frames: a head (number, length, checksum) and a plan's bytes, padded to 8 bytes

A frame is not overwritten before every reader has read it. The last frame contains `END` instead of a plan.
The checksum covers the number, the length and the bytes, so that no memory ordering is required: a reader
that sees the new byte count before the new frame finds an older or incomplete frame, rejects it, and reads
again.
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
"""Default size of the ring in bytes. It is enough for the plans of hundreds of decode steps, or for the plan
of a prefill chunk of a million tokens."""
LINE = 8
"""Number of 8-byte counters in a cache line; each process writes to a different cache line."""
SPIN_SECONDS = 50e-6
"""Time for which a reader polls before it sleeps."""
REREAD_SECONDS = 0.05
FULL_SECONDS = 50e-6
HEAD = struct.Struct("<QQQ")
"""Head of a frame: its number (from 1), the length of its content in bytes, and `frame_checksum`."""
END = b"MZPLEND1"
"""Content of the last frame, which ends the stream of plans."""


class PlanChannelStalled(RuntimeError):
    """A rank did not connect, or did not read plans, within the timeout."""


@dataclass(frozen=True, slots=True)
class RingDescriptors:
    """File descriptors of a ring, which the reading processes inherit."""

    memory: int
    wake: tuple[int, ...]
    """One eventfd per reader, which wakes the reader if it sleeps."""

    @property
    def all(self) -> tuple[int, ...]:
        """Descriptors of the memory and of all eventfds."""
        return (self.memory, *self.wake)

    def close(self) -> None:
        """Close the descriptors in this process."""
        for descriptor in self.all:
            os.close(descriptor)


def create_ring(readers: int, capacity: int = CAPACITY) -> RingDescriptors:
    """Create a ring of `capacity` bytes for `readers` readers; the caller closes the descriptors."""
    memory = os.memfd_create("mizzen-plans")
    os.ftruncate(memory, header_bytes(readers) + capacity)
    return RingDescriptors(memory, tuple(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(readers)))


def header_bytes(readers: int) -> int:
    """Return the size in bytes of the header of a ring with `readers` readers."""
    return 8 * LINE * (1 + readers)


class _RingMemory:
    """A ring's shared memory, mapped into this process."""

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
        """Write `content` at offset `at` of the byte stream, wrapping around the end of the ring."""
        at %= self.capacity
        first = min(len(content), self.capacity - at)
        self.data[at : at + first] = content[:first]
        self.data[: len(content) - first] = content[first:]

    def get(self, at: int, size: int) -> bytes:
        """Return `size` bytes from offset `at` of the byte stream, wrapping around the end of the ring."""
        at %= self.capacity
        first = min(size, self.capacity - at)
        return bytes(self.data[at : at + first]) + bytes(self.data[: size - first])


def frame_size(size: int) -> int:
    """Return the size in bytes of a frame with `size` bytes of content."""
    return HEAD.size + -(-size // 8) * 8


def frame_checksum(number: int, content: bytes) -> int:
    """Return the CRC-32 of a frame's number, length and content."""
    return zlib.crc32(content, zlib.crc32(struct.pack("<QQ", number, len(content))))


class RingWriter:
    """The writing end of a ring, in rank 0. Call `send` and `end` from one thread."""

    def __init__(self, handles: RingDescriptors, timeout_seconds: float = 10.0) -> None:
        self._ring = _RingMemory(handles)
        self._wake = handles.wake
        self._timeout = timeout_seconds
        self._at = 0
        self._number = 0

    def send(self, plan: StepPlan) -> None:
        """Send a plan to all readers; wait while the ring is full.

        Raises:
            PlanChannelStalled: the ring stayed full for `timeout_seconds` because a reader does not read.
            ValueError: the plan is larger than the ring.
        """
        self._write(encode_plan(plan))

    def end(self) -> None:
        """Send the frame that ends the stream; give up if a reader does not read."""
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
                raise PlanChannelStalled(f"rank {late} has read no plan for {self._timeout:g} s")
            time.sleep(FULL_SECONDS)
        self._number += 1
        head = HEAD.pack(self._number, len(content), frame_checksum(self._number, content))
        ring.put(self._at, head + content)
        self._at += size
        ring.written[0] = self._at
        # Copy first: readers write concurrently, and `nonzero` passes over its input twice.
        for reader in ring.sleeps.copy().nonzero()[0].tolist():
            os.eventfd_write(self._wake[reader], 1)


class RingReader:
    """The reading end of a ring, in a rank other than 0. For use from one thread."""

    def __init__(self, handles: RingDescriptors, reader: int) -> None:
        """Open the ring as reader number `reader` (rank - 1)."""
        self._ring = _RingMemory(handles)
        self._reader = reader
        self._wake = handles.wake[reader]
        self._at = 0
        self._number = 1
        """Number of the next frame to read."""
        self.ended = False
        """Whether the frame that ends the stream was received."""

    def receive(self, seconds: float) -> StepPlan | None:
        """Return the next plan, or None if none arrived within `seconds` or the stream has ended.

        Raises:
            MalformedPlan: the frame does not contain a valid plan.
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
            # A frame written from now on wakes this reader; an earlier frame is visible in `written`.
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
        """Return the content of the next frame, which may become visible slightly after the byte count.

        Raises:
            MalformedPlan: the frame is still invalid after `REREAD_SECONDS`.
        """
        deadline = time.monotonic() + REREAD_SECONDS
        while (content := self._peek_frame()) is None:
            if time.monotonic() > deadline:
                raise MalformedPlan(f"frame {self._number} is damaged")
        return content

    def _peek_frame(self) -> bytes | None:
        """Return the content of the next frame, or None while an older or incomplete frame is visible."""
        number, size, check = HEAD.unpack(self._ring.get(self._at, HEAD.size))
        if number != self._number or frame_size(size) > self._ring.capacity:
            return None
        content = self._ring.get(self._at + HEAD.size, size)
        return content if frame_checksum(number, content) == check else None
