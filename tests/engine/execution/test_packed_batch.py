# SPDX-License-Identifier: Apache-2.0
"""Prefill graphs take rotary positions, and rows of the table of images, from the packed batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mizzen.core.images.types import ChunkImage
from mizzen.core.request import Int32, Int64
from mizzen.core.step_plan import PageWrites, PrefillChunk, StepPlan
from mizzen.engine.execution.forward_batch import BatchLayout
from mizzen.engine.execution.packed_batch import PackedLayout, PackedSections
from mizzen.models.image_rows import ImageRows, TableImages

OFFSETS = {0: -5, 1: 0, 2: -7}
"""Differences between rotary and sequence positions, by slot."""


class Slots:
    """The part of the slot state that layouts read."""

    lengths = np.array([40, 12, 0, 0], np.int32)

    def decode_rotary(self, slots: Any, positions: Any) -> Any:
        offsets = np.array([OFFSETS[slot] for slot in slots.tolist()])
        return positions + offsets if offsets.any() else None


def make_plan(decode: list[int], rotary: Int32 | None, images: tuple[ChunkImage, ...] = ()) -> StepPlan:
    """Return a plan with decodes, and a chunk of 3 tokens from position 20 on in slot 2."""
    tokens = np.array([-1 if images else 4, 5, 6], np.int32)
    chunk = PrefillChunk(slot=2, start=20, tokens=tokens, last=True, rotary=rotary, images=images)
    return StepPlan(
        step=1,
        decode=np.array(decode, np.int32),
        decode_version=1,
        pages=PageWrites(),
        prefill=(chunk,),
    )


def text_rotary() -> Int32:
    return np.tile(np.arange(20, 23, dtype=np.int32) + OFFSETS[2], (3, 1))


def image_rotary() -> Int32:
    return text_rotary() + np.array([[0, 0, 0], [0, 1, 0], [0, 0, 1]], np.int32)


IMAGE = ChunkImage(digest=bytes(32), first=0, offsets=np.zeros(1, np.int32))


SCRATCH = 9


def pack(packed: PackedLayout, plan: StepPlan, image_rows: Int64 | None = None) -> PackedSections[Int32]:
    """Return the sections of a buffer that held something else before."""
    state: Any = Slots()
    numbers = np.full(packed.size, 77, np.int32)
    packed.pack(numbers, plan, BatchLayout.from_plan(plan, state), np.array([2]), image_rows, SCRATCH)
    return packed.split(numbers)


@pytest.mark.parametrize("decode", [[1, 0], [1], []])
@pytest.mark.parametrize("rotary", [None, text_rotary(), image_rotary()])
def test_rotary_positions_are_packed(decode: list[int], rotary: Int32 | None) -> None:
    plan = make_plan(decode, rotary)
    decoded = [int(Slots.lengths[slot]) + OFFSETS[slot] for slot in decode]
    chunk = np.tile(np.arange(20, 23), (3, 1)) if rotary is None else rotary
    packed, plain = PackedLayout(16, 8, has_rotary=True), PackedLayout(16, 8)
    parts = pack(packed, plan)
    for axis, positions in enumerate(parts.rotary.reshape(3, 16)):
        expected = [*decoded, *chunk[axis].tolist()]
        assert positions.tolist() == [*expected, *[0] * (16 - len(expected))]
    without = pack(plain, plan)
    assert plain.size == packed.size - 3 * 16
    assert not len(without.rotary)
    for part, same in zip(parts[:-2], without[:-2], strict=True):
        assert np.array_equal(part, same)


def test_rows_of_images_are_packed() -> None:
    packed = PackedLayout(16, 8, has_rotary=True, has_images=True)
    shown = pack(packed, make_plan([0], image_rotary(), (IMAGE,)), np.array([41]))
    assert shown.images.tolist() == [-1, 41, *[-1] * 14]
    assert shown.host_tokens.tolist() == [-1, 0, 5, 6, *[0] * 12]
    text = pack(packed, make_plan([0], text_rotary()))
    assert (text.images == -1).all()


def test_padding_is_like_an_empty_batch() -> None:
    packed = PackedLayout(16, 8, has_rotary=True, has_images=True)
    parts = packed.split(packed.make_padding(SCRATCH))
    assert (parts.slots == SCRATCH).all()
    assert (parts.sequence_slots == SCRATCH).all()
    assert parts.starts.tolist() == [0, *[16] * 9]
    assert (parts.rows == -1).all()
    assert (parts.images == -1).all()


@pytest.mark.parametrize("layers", [0, 3])
def test_a_table_of_images_equals_rows_of_images(layers: int) -> None:
    """Rows of the table that no token uses are not numbers."""
    hidden, tokens = 8, 12
    table = torch.full((20, hidden * (1 + layers)), torch.nan)
    rows, used = torch.tensor([1, 4, 5, 9]), torch.tensor([7, 19, 2, 3])
    table[used] = torch.randn((4, hidden * (1 + layers)), generator=torch.Generator().manual_seed(0))
    indices = torch.full((tokens,), -1, dtype=torch.int32)
    indices[rows] = used.int()
    eager, captured = ImageRows(rows, table[used]), TableImages.from_indices(table, indices)
    assert eager.layers(hidden) == captured.layers(hidden) == layers
    streams = [torch.ones((tokens, hidden)), torch.ones((tokens, hidden))]
    for images, residual in zip((eager, captured), streams, strict=True):
        images.replace_tokens(residual)
        for layer in range(layers):
            images.add_part(residual, layer)
    assert torch.equal(*streams)
    expected = torch.ones((tokens, hidden))
    expected[rows] = table[used].view(4, 1 + layers, hidden).sum(1)
    torch.testing.assert_close(streams[0], expected)
