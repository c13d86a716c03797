# SPDX-License-Identifier: Apache-2.0
"""Streams byte ranges of files to a GPU through pinned memory, or into main memory, with several threads.

Each thread reads blocks with `preadv`, which releases the interpreter lock. If the tensors are on a GPU, the
thread reads a block into one of its pinned buffers while the GPU copies another buffer. If the tensors are in
main memory, the thread reads straight into them: a copy by PyTorch would wait for several threads for each
tensor, which takes long on busy cores.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from mizzen.layers.weight_target import WeightTarget
from mizzen.weights.checkpoint_files import read_header

THREADS = 8
BLOCK = 16 << 20
"""Maximum size of a block in bytes; a thread reads one block at a time."""
BUFFERS_PER_THREAD = 2
"""Number of blocks that a thread keeps in flight."""
SHORT_RUN = 8 << 10
"""Length in bytes below which runs are not read one by one, because a read takes longer than the bytes
between two runs."""
MAX_PARTS = 1024
"""Maximum number of places in memory that one read fills (IOV_MAX of Linux)."""
MAX_STRIDES = 16
"""Maximum distance of short runs, in runs, up to which the bytes between them are read, too."""
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
    "U8": torch.uint8,
}
"""Dtypes whose bytes can be copied, by their names in safetensors."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Range of bytes of a file, possibly strided, and the tensor that they are copied to."""

    path: Path
    start: int
    destination: torch.Tensor
    """Contiguous uint8 tensor whose length is the number of bytes to copy."""
    run_bytes: int = 0
    """Length in bytes of each run, if the bytes are in equally spaced runs; 0 if they are contiguous."""
    stride: int = 0
    """Number of bytes from the start of one run to the start of the next."""

    @property
    def size(self) -> int:
        """Number of bytes to copy."""
        return self.destination.numel()

    @property
    def reads_gaps(self) -> bool:
        """Whether the bytes between runs are read as well, so that one read suffices for many runs."""
        return 0 < self.run_bytes < SHORT_RUN and self.stride <= MAX_STRIDES * self.run_bytes

    def read(self, descriptor: int, into: np.ndarray, buffer: np.ndarray) -> None:
        """Fill `into`, uint8 of the size of the destination, with the bytes from an open file.

        The bytes between runs are read into `buffer`, uint8 [`BLOCK`], whose beginning may be `into`.

        Raises:
            OSError: the file cannot be read, or is truncated.
        """
        size = len(into)
        run = self.run_bytes or size
        if not self.reads_gaps:
            for index, first in enumerate(range(0, size, run)):
                part = into[first : first + run].data
                read_exactly(descriptor, [part], self.start + index * self.stride, self.path)
            return
        count = size // run
        read_exactly(descriptor, [buffer[: (count - 1) * self.stride + run].data], self.start, self.path)
        into.reshape(count, run)[:] = as_strided(buffer, (count, run), (self.stride, 1))


class SafetensorsHeader:
    """Header of a safetensors file, with the byte offsets of its tensors."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is a Git LFS pointer, or its header is not valid JSON or too long.
            struct.error: the file is shorter than 8 bytes.
        """
        self.path = path
        self.entries, self.data = read_header(path)

    def file_range(self, target: WeightTarget) -> FileRange | None:
        """Return the byte range that fills a target, or None if the target cannot be filled by copying bytes.

        Bytes can be copied only if the target is contiguous, has the dtype of the file's tensor and the shape
        of its shard, and is a slice of that tensor's rows or, for a matrix, of its rows and columns. In the
        latter case, the part of each row must not exceed `BLOCK` bytes. A single matrix of a stack of them
        counts as a matrix.
        """
        entry = self.entries[target.name]
        if tuple(entry["shape"]) not in (target.shape, *target.other_shapes):
            return None
        if DTYPES.get(entry["dtype"]) != target.destination.dtype or not target.destination.is_contiguous():
            return None
        begin, end = entry["data_offsets"]
        shape, shard = list(target.shape), list(target.shard)
        while len(shape) > 2 and shard[0].stop - shard[0].start == 1:  # a matrix of a stack
            size = (end - begin) // shape.pop(0)
            begin += shard.pop(0).start * size
            end = begin + size
        rows, *rest = shard
        row_bytes = (end - begin) // shape[0]
        start, into = (
            self.data + begin + rows.start * row_bytes,
            target.destination.view(-1).view(torch.uint8),
        )
        if all(part == slice(0, size) for part, size in zip(rest, shape[1:], strict=True)):
            return FileRange(self.path, start, into)
        if len(rest) != 1:
            return None
        (columns,), size = rest, target.destination.element_size()
        run = (columns.stop - columns.start) * size
        if run > BLOCK:
            return None
        return FileRange(self.path, start + columns.start * size, into, run, row_bytes)


def split_into_blocks(file_ranges: list[FileRange]) -> Iterator[FileRange]:
    """Split file ranges into ranges of at most `BLOCK` bytes."""
    for file_range in file_ranges:
        space = file_range.stride if file_range.reads_gaps else file_range.run_bytes
        runs = max(1, BLOCK // space) if space else 0
        step = runs * file_range.run_bytes or BLOCK
        for first in range(0, file_range.size, step):
            start = first // file_range.run_bytes * file_range.stride if file_range.run_bytes else first
            part = file_range.destination[first : first + step]
            yield FileRange(
                file_range.path, file_range.start + start, part, file_range.run_bytes, file_range.stride
            )


def join_neighbours(blocks: Iterable[FileRange]) -> Iterator[list[FileRange]]:
    """Yield the blocks in the order of the files, joined with neighbours that one read of `BLOCK` covers.

    The tensors of a mixture's experts are many and may be small, and lie side by side in files.
    """
    joined: list[FileRange] = []
    size = 0
    for block in sorted(blocks, key=lambda block: (str(block.path), block.start)):
        length = block.size
        follows = (
            bool(joined)
            and joined[-1].path == block.path
            and not (joined[-1].run_bytes or block.run_bytes)
            and joined[0].start + size == block.start
            and size + length <= BLOCK
        )
        if joined and not follows:
            yield joined
            joined, size = [], 0
        joined.append(block)
        size += length
    if joined:
        yield joined


def read_blocks(
    descriptor: int, blocks: list[FileRange], into: Sequence[np.ndarray], buffer: np.ndarray
) -> None:
    """Fill `into`, one uint8 array for each of several neighbouring blocks of an open file, with their bytes.

    For `buffer` see `FileRange.read`.

    Raises:
        OSError: the file cannot be read, or is truncated.
    """
    if len(blocks) == 1:
        blocks[0].read(descriptor, into[0], buffer)
    else:
        read_exactly(descriptor, [part.data for part in into], blocks[0].start, blocks[0].path)


class ThreadBuffers(threading.local):
    """Buffers and, for a GPU, the CUDA stream of a reader; each thread has other values of the attributes.

    Buffers for a GPU are pinned. For main memory, they take no memory until `FileRange.read` needs one.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)  # a new thread uses the first GPU, and would allocate memory there
        self.buffers = [
            torch.empty(BLOCK, dtype=torch.uint8, pin_memory=cuda) for _ in range(BUFFERS_PER_THREAD)
        ]
        self.stream = torch.cuda.Stream(device) if cuda else None
        self.copied: list[torch.cuda.Event | torch.Event | None] = [None] * BUFFERS_PER_THREAD
        self.next_buffer = 0

    def copy_blocks(self, descriptor: int, blocks: list[FileRange]) -> int:
        """Read neighbouring blocks of an open file to their destinations; return their size.

        The copies to a GPU may still run afterwards.

        Raises:
            OSError: the file cannot be read, or is truncated.
        """
        sizes = [block.size for block in blocks]
        if self.stream is None:
            into = [block.destination.numpy() for block in blocks]
            read_blocks(descriptor, blocks, into, self.buffers[0].numpy())
            return sum(sizes)
        self.next_buffer = (self.next_buffer + 1) % BUFFERS_PER_THREAD
        if (event := self.copied[self.next_buffer]) is not None:
            event.synchronize()
        buffer = self.buffers[self.next_buffer]
        parts = buffer[: sum(sizes)].split(sizes)
        read_blocks(descriptor, blocks, [part.numpy() for part in parts], buffer.numpy())
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            for block, part in zip(blocks, parts, strict=True):
                block.destination.copy_(part, non_blocking=True)
        self.copied[self.next_buffer] = self.stream.record_event()
        return sum(sizes)


def read_exactly(descriptor: int, parts: Sequence[memoryview], start: int, path: Path) -> None:
    """Fill `parts`, one after the other, with the bytes of an open file from offset `start` on.

    `path` is for the error message.

    Raises:
        OSError: the file cannot be read, or is truncated.
    """
    first, filled = 0, 0  # the first part that is not full, and its number of bytes that are
    while first < len(parts):
        following = parts[first + 1 : first + MAX_PARTS]
        count = os.preadv(descriptor, [parts[first][filled:], *following], start)
        if not count:
            raise OSError(f"{path} ends at byte {start}, in the middle of a tensor")
        start += count
        filled += count
        while first < len(parts) and filled >= len(parts[first]):
            filled -= len(parts[first])
            first += 1


def stream_to_device(file_ranges: list[FileRange], done: Callable[[int], None]) -> None:
    """Copy file ranges to their destinations, which must all be on one device, or all in main memory.

    After each read, `done` is called with its size in bytes.

    Raises:
        OSError: a file cannot be read, or is truncated.
    """
    if not file_ranges:
        return
    device = file_ranges[0].destination.device
    buffers = ThreadBuffers(device)
    descriptors = {
        path: os.open(path, os.O_RDONLY) for path in {file_range.path for file_range in file_ranges}
    }
    try:
        with ThreadPoolExecutor(THREADS, "mizzen-weights") as pool:
            reads = join_neighbours(split_into_blocks(file_ranges))
            futures = [pool.submit(buffers.copy_blocks, descriptors[read[0].path], read) for read in reads]
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
