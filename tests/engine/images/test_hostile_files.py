# SPDX-License-Identifier: Apache-2.0
"""Damaged files neither end a process that decodes images nor fill its memory.

The environment variable MIZZEN_FUZZED_IMAGES sets the number of damaged files.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import psutil
import pytest
from image_files import MODES, orientation_exif, write_image
from model_files import qwen_rules

from mizzen.engine.images.decoder import ImageDecoder
from mizzen.engine.images.tasks import DecodedImage, DecodeFailure
from mizzen.images.header import read_header
from mizzen.images.types import InvalidImage

MakeDecoder = Callable[..., ImageDecoder]
COUNT = int(os.environ.get("MIZZEN_FUZZED_IMAGES", "2000"))
WINDOW = 64
"""Number of images that are submitted before the result of the first one is awaited."""
PATIENCE = 120.0
ONE_PROCESS = 1 << 30
"""Number of images after which a process is replaced, so that none is."""
MAX_GROWTH = 48 << 20
"""Number of bytes by which the memory of a process may vary."""


def damage(content: bytes, other: bytes, source: random.Random) -> bytes:
    """Return a file with a few changes: bytes replaced, removed or inserted, parts repeated or exchanged."""
    damaged = bytearray(content)
    for _ in range(source.choice((1, 1, 2, 4, 16))):
        at = source.randrange(len(damaged))
        length = source.choice((1, 2, 4, 64))
        match source.randrange(6):
            case 0:
                damaged[at] = source.choice((0, 1, 0x7F, 0x80, 0xFF, source.randrange(256)))
            case 1:
                damaged[at] ^= 1 << source.randrange(8)
            case 2:
                del damaged[at : at + length]
            case 3:
                damaged[at:at] = source.randbytes(length)
            case 4:
                damaged[at : at + length] = damaged[:length]
            case 5:
                damaged[at:] = other[source.randrange(len(other)) :]
        if len(damaged) < 2:
            return b"\xff\xd8"
    return bytes(damaged)


def damaged_files(count: int) -> Iterator[tuple[bytes, tuple[int, int]]]:
    """Yield damaged files of all formats, and their sizes according to their headers or before the damage."""
    source = random.Random(5)
    files = []
    for kind, mode in [(kind, mode) for kind, modes in MODES.items() for mode in modes]:
        options = {} if kind == "GIF" else {"exif": orientation_exif(6)}
        if kind == "JPEG" and mode == "L":
            options["progressive"] = True
        files.append(write_image(kind, mode, (40, 31), **options))
    for _ in range(count):
        content, other = source.sample(files, 2)
        damaged = damage(content, other, source)
        try:
            header = read_header(damaged)
        except InvalidImage:
            header = read_header(content)
        yield damaged, (header.width, header.height)


def decode_all(
    decoder: ImageDecoder, files: Iterable[tuple[bytes, tuple[int, int]]], check: Callable[[int], None]
) -> Iterator[DecodedImage]:
    """Decode files, and yield their results; after each result, call `check` with the number of results."""
    rules = qwen_rules("qwen2_vl", max_pixels=28 * 28 * 16)
    submitted = done = 0
    end = time.monotonic() + PATIENCE + 0.1 * COUNT
    iterator = iter(files)
    file = next(iterator, None)
    while file is not None or done < submitted:
        while file is not None and submitted - done < WINDOW:
            decoder.submit(b"%d" % submitted, file[0], rules, file[1])
            submitted += 1
            file = next(iterator, None)
        for result in decoder.drain():
            done += 1
            yield result
            check(done)
        time.sleep(0.001)
        assert time.monotonic() < end


class MemoryCheck:
    """Records the memory of this process and of a decoder's process, once both are warm."""

    def __init__(self, decoder: ImageDecoder, warm: int) -> None:
        self._decoder = decoder
        self._warm = warm
        self._first: dict[int, int] = {}

    def __call__(self, done: int) -> None:
        if done == self._warm:
            self._first = self.measure()

    def measure(self) -> dict[int, int]:
        """Return the resident memory in bytes by process id."""
        return {
            process: psutil.Process(process).memory_info().rss
            for process in (os.getpid(), *self._decoder.process_ids)
        }

    def assert_flat(self) -> None:
        """Check that the memory has not grown by more than MAX_GROWTH."""
        last = self.measure()
        assert set(last) == set(self._first), "a process was replaced"
        for process, used in last.items():
            assert used - self._first[process] < MAX_GROWTH, (process, self._first, last)


def test_damaged_files_are_refused_or_decoded(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(process_images=ONE_PROCESS)
    memory = MemoryCheck(decoder, COUNT // 4)
    outcomes: Counter[DecodeFailure | None] = Counter()
    for result in decode_all(decoder, damaged_files(COUNT), memory):
        outcomes[result.failure] += 1
        assert (result.pixels is None) == bool(result.error)
        if result.failure is DecodeFailure.INVALID:
            assert result.error.startswith("the image ") and "0x" not in result.error
    assert sum(outcomes.values()) == COUNT
    assert set(outcomes) == {None, DecodeFailure.INVALID}, outcomes
    assert min(outcomes.values()) > COUNT / 20, outcomes
    assert decoder.counts.restarts == 0
    memory.assert_flat()
    print(outcomes, decoder.counts)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_images(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(process_images=ONE_PROCESS)
    kinds = [("JPEG", "RGB"), ("PNG", "RGBA"), ("WEBP", "RGB"), ("GIF", "P")]
    files = [write_image(*kind, (60, 45), seed) for kind in kinds for seed in range(20)]
    memory = MemoryCheck(decoder, 1000)
    descriptors = len(os.listdir("/proc/self/fd"))
    stream = ((files[number % len(files)], (60, 45)) for number in range(10_000))
    for result in decode_all(decoder, stream, memory):
        assert result.pixels is not None
    assert decoder.counts.decoded == 10_000
    assert len(os.listdir("/proc/self/fd")) < descriptors + 50
    memory.assert_flat()
