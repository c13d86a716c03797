"""Brings ranges of files to a GPU through pinned memory, several at a time.

Threads read blocks of files with `preadv` (which needs no interpreter lock) into pinned buffers of their own,
from where the GPU copies them while the thread reads its next block into its other buffer.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from mizzen.layers.context import WeightTarget

THREADS = 8
BLOCK = 16 << 20
"""Bytes that are read at once."""
BUFFERS = 2
"""Blocks that a thread has under way."""
TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
LONGEST_HEADER = 100 << 20
POINTER = b"version https://git-lfs."
"""How a file begins that Git LFS left in place of another."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file and where they go."""

    path: Path
    start: int
    into: torch.Tensor
    """uint8, contiguous."""
    run: int = 0
    """They lie apart in runs of so many bytes; 0: they lie together."""
    stride: int = 0
    """Bytes from one run's beginning to the next one's."""


class SafetensorsHeader:
    """Where the tensors of a safetensors file lie."""

    def __init__(self, path: Path) -> None:
        """Read it.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no safetensors file.
        """
        with path.open("rb") as file:
            begin = file.read(len(POINTER))
            if begin == POINTER:
                raise ValueError("it is a pointer of Git LFS: fetch the file itself (git lfs pull)")
            (size,) = struct.unpack("<Q", begin[:8])
            if size > LONGEST_HEADER:
                raise ValueError(f"its header is {size} bytes long")
            file.seek(8)
            self.entries = json.loads(file.read(size))
        self.path = path
        self.data = 8 + size

    def file_range(self, target: WeightTarget) -> FileRange | None:
        """Return the bytes of a target; None where they are of another dtype, or neither rows nor columns."""
        entry = self.entries[target.name]
        rows, *rest = target.shard
        if TYPES.get(entry["dtype"]) != target.destination.dtype or not target.destination.is_contiguous():
            return None
        begin, end = entry["data_offsets"]
        row_bytes = (end - begin) // target.shape[0]
        start, into = self.data + begin + rows.start * row_bytes, target.destination.view(-1).view(torch.uint8)
        if all(part == slice(0, size) for part, size in zip(rest, target.shape[1:], strict=True)):
            return FileRange(self.path, start, into)
        if len(rest) != 1:
            return None
        (columns,), size = rest, target.destination.element_size()
        run = (columns.stop - columns.start) * size
        if run > BLOCK:
            return None
        return FileRange(self.path, start + columns.start * size, into, run, row_bytes)


def split_into_blocks(pieces: list[FileRange]) -> Iterator[FileRange]:
    """Cut pieces into blocks."""
    for piece in pieces:
        runs = max(1, BLOCK // piece.run_bytes) if piece.run_bytes else 0
        step = runs * piece.run_bytes or BLOCK
        for first in range(0, len(piece.destination), step):
            start = first // piece.run_bytes * piece.stride if piece.run_bytes else first
            part = piece.destination[first : first + step]
            yield FileRange(piece.path, piece.start + start, part, piece.run_bytes, piece.stride)


class ThreadBuffers(threading.local):
    """A thread's buffers, its stream and its open files."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)  # a thread begins on the first GPU, and would take memory there
        self.buffers = [torch.empty(BLOCK, dtype=torch.uint8, pin_memory=cuda) for _ in range(BUFFERS)]
        self.stream = torch.cuda.Stream(device) if cuda else None
        self.copied: list[torch.cuda.Event | None] = [None] * BUFFERS
        self.turn = 0

    def fill(self, descriptor: int, piece: FileRange) -> int:
        """Read a block and start its copy; return its bytes.

        Raises:
            OSError: the file cannot be read, or ends too soon.
        """
        self.turn = (self.turn + 1) % BUFFERS
        if (event := self.copied[self.turn]) is not None:
            event.synchronize()
        size = len(piece.destination)
        buffer = self.buffers[self.turn][:size]
        view, run = memoryview(buffer.numpy()), piece.run_bytes or size
        for index, first in enumerate(range(0, size, run)):
            read(descriptor, view[first : first + run], piece.start + index * piece.stride, piece.path)
        with torch.inference_mode():
            if self.stream is None:
                piece.destination.copy_(buffer)
            else:
                with torch.cuda.stream(self.stream):
                    piece.destination.copy_(buffer, non_blocking=True)
                self.copied[self.turn] = self.stream.record_event()
        return size


def read(descriptor: int, into: memoryview, start: int, path: Path) -> None:
    """Read bytes of a file.

    Raises:
        OSError: it cannot be read, or ends too soon.
    """
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], start + done)
        if not count:
            raise OSError(f"{path} ends at byte {start + done}, in the middle of a tensor")
        done += count


def stream(pieces: list[FileRange], done: Callable[[int], None]) -> None:
    """Read pieces, all for one device, to where they go; `done` is called with bytes as they are read.

    Raises:
        OSError: a file cannot be read, or ends too soon.
    """
    if not pieces:
        return
    device = pieces[0].into.device
    lane = ThreadBuffers(device)
    descriptors = {path: os.open(path, os.O_RDONLY) for path in {piece.path for piece in pieces}}
    try:
        with ThreadPoolExecutor(THREADS, "mizzen-weights") as pool:
            parts = split_into_blocks(pieces)
            futures = [pool.submit(lane.fill, descriptors[part.path], part) for part in parts]
            try:
                for future in as_completed(futures):
                    done(future.result())
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
