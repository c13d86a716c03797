# SPDX-License-Identifier: Apache-2.0
"""File ranges of any size and position are streamed completely; errors name the file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mizzen.layers.weight_target import WeightTarget
from mizzen.weights import stream as streaming
from mizzen.weights.stream import FileRange, SafetensorsHeader, stream_to_device


def target(name: str, source: torch.Tensor, *shard: slice) -> WeightTarget:
    """Return a target for a shard; dimensions without a slice are whole."""
    index = (*shard, *(slice(0, size) for size in source.shape[len(shard) :]))
    into = torch.full(source[index].shape, 7.0).to(source.dtype)
    return WeightTarget(name=name, shape=tuple(source.shape), shard=index, destination=into)


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    contents = {
        "a": torch.randn(31, 17, generator=generator).bfloat16(),
        "b": torch.randn(64, 33, generator=generator),
        "c": torch.randn(5, generator=generator).half(),
        "stack": torch.randn(4, 12, 10, generator=generator),
        "d": torch.randn(40, 24, generator=generator).to(torch.float8_e4m3fn),
        "e": torch.randint(-(2**31), 2**31, (24, 12), dtype=torch.int32, generator=generator),
        "f": torch.randint(-128, 128, (9, 5), dtype=torch.int8, generator=generator),
    }
    save_file(contents, tmp_path / "x.safetensors", {"format": "pt"})
    return contents


@pytest.mark.parametrize("short", [0, 13, 8192])
@pytest.mark.parametrize("block", [100, 400])
def test_file_ranges_are_slices_of_tensors(
    block: int,
    short: int,
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs below `short` bytes are read together with the bytes between them."""
    monkeypatch.setattr(streaming, "BLOCK", block)
    monkeypatch.setattr(streaming, "SHORT_RUN", short)
    header = SafetensorsHeader(tmp_path / "x.safetensors")
    targets = [
        target("a", tensors["a"], slice(0, 31)),
        target("b", tensors["b"], slice(20, 40)),
        target("c", tensors["c"], slice(1, 4)),
        target("b", tensors["b"], slice(0, 64), slice(11, 22)),
        target("a", tensors["a"], slice(3, 30), slice(16, 17)),
        target("stack", tensors["stack"], slice(1, 3)),
        target("stack", tensors["stack"], slice(2, 3), slice(4, 9)),
        target("stack", tensors["stack"], slice(3, 4), slice(0, 12), slice(5, 10)),
        target("d", tensors["d"], slice(0, 40), slice(8, 16)),
        target("e", tensors["e"], slice(0, 24), slice(4, 8)),
        target("f", tensors["f"], slice(2, 9)),
    ]
    pieces = [header.file_range(expected) for expected in targets]
    assert None not in pieces
    together = [piece.reads_gaps for piece in pieces if piece is not None]
    assert together.count(True) == {0: 0, 13: 1, 8192: 4}[short]
    ranges: list[int] = []
    stream_to_device([piece for piece in pieces if piece is not None], ranges.append)
    for expected in targets:
        stored = tensors[expected.name][expected.shard]
        assert torch.equal(expected.destination.double(), stored.double())
    assert sum(ranges) == sum(expected.destination.nbytes for expected in targets)


@pytest.mark.parametrize(("block", "reads"), [(1 << 20, 2), (3000, 10), (1000, 30)])
def test_neighbouring_tensors_are_read_together(
    block: int, reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files hold 15 tensors of 1,000 bytes each, whose targets come in another order than the tensors."""
    monkeypatch.setattr(streaming, "BLOCK", block)
    count = 0

    def read(descriptor: int, parts: Sequence[memoryview], start: int, path: Path) -> None:
        nonlocal count
        count += 1
        read_exactly(descriptor, parts, start, path)

    read_exactly = streaming.read_exactly
    monkeypatch.setattr(streaming, "read_exactly", read)
    monkeypatch.setattr(streaming, "THREADS", 1)
    contents = {str(i): torch.full((10, 25), float(i)) for i in range(30)}
    pieces, targets = [], []
    for first in (0, 15):
        path = tmp_path / f"{first}.safetensors"
        save_file({str(i): contents[str(i)] for i in range(first, first + 15)}, path)
        header = SafetensorsHeader(path)
        for i in reversed(range(first, first + 15)):
            targets.append(target(str(i), contents[str(i)]))
            pieces.append(header.file_range(targets[-1]))
    sizes: list[int] = []
    stream_to_device([piece for piece in pieces if piece is not None], sizes.append)
    assert (count, sum(sizes)) == (reads, 30_000)
    assert all(torch.equal(each.destination, contents[each.name]) for each in targets)


@pytest.mark.parametrize(("most", "parts"), [(1, 1024), (700, 1024), (1 << 30, 3)])
def test_short_reads_are_continued(
    most: int, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read returns at most `most` bytes, and fills at most `parts` tensors; some are empty."""

    def read(descriptor: int, into: Sequence[memoryview], start: int) -> int:
        assert len(into) <= parts
        content = os.pread(descriptor, most, start)
        done = 0
        for part in into:
            taken = content[done : done + len(part)]
            part[: len(taken)] = taken
            done += len(taken)
        return done

    content = bytes(range(256)) * 8
    path = tmp_path / "x"
    path.write_bytes(content)
    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(streaming, "MAX_PARTS", parts)
    sizes = [1, 0, 0, 999, 3, 5, 700, 0]
    found = [bytearray(size) for size in sizes]
    with path.open("rb") as file:
        streaming.read_exactly(file.fileno(), [memoryview(part) for part in found], 7, path)
        assert b"".join(found) == content[7 : 7 + sum(sizes)]
        with pytest.raises(OSError, match="x ends at byte 2048"):
            streaming.read_exactly(file.fileno(), [memoryview(bytearray(2000))], 100, path)


def test_converted_and_strided_targets_have_no_file_range(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    header = SafetensorsHeader(tmp_path / "x.safetensors")
    converted = target("a", tensors["a"].float(), slice(0, 31))
    assert header.file_range(converted) is None
    reshaped = WeightTarget(
        name="f", shape=(45,), shard=(slice(0, 45),), destination=torch.zeros(45, dtype=torch.int8)
    )
    assert header.file_range(reshaped) is None
    strided = torch.zeros(31, 34, dtype=torch.bfloat16)[:, ::2]
    assert header.file_range(target("stack", tensors["stack"], slice(0, 2), slice(4, 9))) is None
    index = (slice(0, 31), slice(0, 17))
    assert header.file_range(WeightTarget(name="a", shape=(31, 17), shard=index, destination=strided)) is None


def test_a_truncated_file_is_named(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = SafetensorsHeader(path)
    piece = header.file_range(target("b", tensors["b"], slice(0, 64)))
    assert piece is not None
    last_offset = FileRange(path, path.stat().st_size - 10, piece.destination)
    with pytest.raises(OSError, match=r"x\.safetensors ends at byte \d+"):
        stream_to_device([last_offset], lambda size: None)


def test_a_file_that_is_not_safetensors_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="header"):
        SafetensorsHeader(path)
