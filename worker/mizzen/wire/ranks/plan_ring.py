"""Plans from rank 0 to the other ranks of a pod, through shared memory: one writer, several readers.

    header    how many bytes were ever written; of each reader, how many it has read, and whether it sleeps
    data      frames of a head (number, length, checksum) and a plan's bytes, padded to 8, around a ring

Nothing is overwritten before every reader has it. The end is a frame of its own. The checksum, which covers
head and bytes, makes up for what memory models leave open: a reader that sees that there is a frame before it
sees the frame finds the one of a lap ago, or a part of it, under another number, and reads again.
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
"""Bytes of the ring: some hundred steps of decodes, or a prompt chunk of a million tokens."""
LINE = 8
"""Numbers (of 8 bytes) in a line of the processor's cache: no two sides write to one line."""
SPIN_SECONDS = 50e-6
"""How long a reader looks again and again before it sleeps."""
REREAD_SECONDS = 0.05
FULL_SECONDS = 50e-6
HEAD = struct.Struct("<QQQ")
"""Of a frame: its number, counted from 1, its length, and the checksum of both and of what follows."""
END = b"MZPLEND1"
"""What the last frame holds."""


class PlanChannelStalled(RuntimeError):
    """A rank takes no plans any more."""


@dataclass(frozen=True, slots=True)
class RingHandles:
    """Descriptors of a ring, for the processes that share it."""

    memory: int
    wake: tuple[int, ...]
    """An eventfd a reader."""

    @property
    def all(self) -> tuple[int, ...]:
        """Return every descriptor."""
        return (self.memory, *self.wake)

    def close(self) -> None:
        """Close them in this process."""
        for descriptor in self.all:
            os.close(descriptor)


def create_ring(readers: int, capacity: int = CAPACITY) -> RingHandles:
    """Make a ring for a number of readers; the caller closes the handles."""
    memory = os.memfd_create("mizzen-plans")
    os.ftruncate(memory, header_bytes(readers) + capacity)
    return RingHandles(memory, tuple(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(readers)))


def header_bytes(readers: int) -> int:
    """Return the bytes in front of the data."""
    return 8 * LINE * (1 + readers)


class _Ring:
    """Both ends' view of the memory."""

    def __init__(self, handles: RingHandles) -> None:
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
        """Write bytes at a position of the stream, around the end."""
        at %= self.capacity
        first = min(len(content), self.capacity - at)
        self.data[at : at + first] = content[:first]
        self.data[: len(content) - first] = content[first:]

    def get(self, at: int, size: int) -> bytes:
        """Read bytes at a position of the stream, around the end."""
        at %= self.capacity
        first = min(size, self.capacity - at)
        return bytes(self.data[at : at + first]) + bytes(self.data[: size - first])


def padded(size: int) -> int:
    """Return what a frame of a content of so many bytes takes."""
    return HEAD.size + -(-size // 8) * 8


def checksum(number: int, content: bytes) -> int:
    """Return the CRC-32 of a frame, its number and length included."""
    return zlib.crc32(content, zlib.crc32(struct.pack("<QQ", number, len(content))))


class RingWriter:
    """Rank 0's end. `send` and `end` from one thread."""

    def __init__(self, handles: RingHandles, timeout_seconds: float = 10.0) -> None:
        self._ring = _Ring(handles)
        self._wake = handles.wake
        self._timeout = timeout_seconds
        self._at = 0
        self._number = 0

    def send(self, plan: StepPlan) -> None:
        """Hand a plan to all readers; waits while one is far behind.

        Raises:
            PlanChannelStalled: a reader stays far behind.
            ValueError: the plan is larger than the ring.
        """
        self._write(encode_plan(plan))

    def end(self) -> None:
        """Tell readers that nothing more comes; one that is stuck is not waited for."""
        try:
            self._write(END)
        except PlanChannelStalled:
            pass

    def _write(self, content: bytes) -> None:
        ring, size = self._ring, padded(len(content))
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
        head = HEAD.pack(self._number, len(content), checksum(self._number, content))
        ring.put(self._at, head + content)
        self._at += size
        ring.written[0] = self._at
        # Of a copy: readers write there meanwhile, and numpy counts first and collects then.
        for reader in ring.sleeps.copy().nonzero()[0].tolist():
            os.eventfd_write(self._wake[reader], 1)


class RingReader:
    """Another rank's end, used from one thread."""

    def __init__(self, handles: RingHandles, reader: int) -> None:
        """Take reader number `reader` (rank - 1)."""
        self._ring = _Ring(handles)
        self._reader = reader
        self._wake = handles.wake[reader]
        self._at = 0
        self._number = 1
        """Of the frame that comes next."""
        self.ended = False
        """Nothing more comes."""

    def receive(self, seconds: float) -> StepPlan | None:
        """Return the next plan; None when none came within so many seconds, or the end did.

        Raises:
            MalformedPlan: what came is no plan.
        """
        if self.ended or not self._wait(seconds):
            return None
        content = self._read()
        plan = None if content == END else decode_plan(content)
        self._at += padded(len(content))
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
            # What is written from here on wakes this reader; what was written before shows.
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
        """Return what the next frame holds, which may show a little later than that it is there.

        Raises:
            MalformedPlan: it does not show.
        """
        deadline = time.monotonic() + REREAD_SECONDS
        while (content := self._look()) is None:
            if time.monotonic() > deadline:
                raise MalformedPlan(f"frame {self._number} is damaged")
        return content

    def _look(self) -> bytes | None:
        """Return what the next frame holds; None while something else, or a part of it, is in its place."""
        number, size, check = HEAD.unpack(self._ring.get(self._at, HEAD.size))
        if number != self._number or padded(size) > self._ring.capacity:
            return None
        content = self._ring.get(self._at + HEAD.size, size)
        return content if checksum(number, content) == check else None
