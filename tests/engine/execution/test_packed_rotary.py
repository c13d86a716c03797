# SPDX-License-Identifier: Apache-2.0
"""Prefill graphs run text after images, and take its rotary positions from the packed batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mizzen.core.images.types import ChunkImage
from mizzen.core.request import Int32
from mizzen.core.step_plan import PageWrites, PrefillChunk, StepPlan
from mizzen.engine.execution.forward_batch import BatchLayout
from mizzen.engine.execution.prefill_graphs import PackedLayout, PrefillGraphs

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


def make_graphs(*, has_rotary: bool) -> Any:
    return SimpleNamespace(sizes=[16], max_sequences=8, has_rotary=has_rotary, scratch_slot=9)


IMAGE = ChunkImage(digest=bytes(32), first=0, offsets=np.zeros(1, np.int32))


@pytest.mark.parametrize(
    ("plan", "has_rotary", "expected"),
    [
        (make_plan([1], None), False, True),
        (make_plan([1], None), True, True),
        (make_plan([0, 1], None), True, True),
        (make_plan([0, 1], text_rotary()), True, True),
        (make_plan([], text_rotary()), True, True),
        (make_plan([], image_rotary()), True, False),
        (make_plan([0], text_rotary()), False, False),
        (make_plan([0], text_rotary(), (IMAGE,)), True, False),
    ],
)
def test_graphs_run_text_but_no_images(plan: StepPlan, has_rotary: bool, expected: bool) -> None:
    state: Any = Slots()
    layout = BatchLayout.from_plan(plan, state)
    assert PrefillGraphs.can_run(make_graphs(has_rotary=has_rotary), plan, layout, 1) == expected


@pytest.mark.parametrize("decode", [[1, 0], [1], []])
@pytest.mark.parametrize("rotary", [None, text_rotary()])
def test_rotary_positions_are_packed(decode: list[int], rotary: Int32 | None) -> None:
    state: Any = Slots()
    plan = make_plan(decode, rotary)
    layout = BatchLayout.from_plan(plan, state)
    packed = PackedLayout(16, 8, has_rotary=True)
    numbers = np.full(packed.size, 77, np.int32)
    PrefillGraphs.pack_batch(make_graphs(has_rotary=True), packed, numbers, plan, layout, np.array([2]))
    *others, packed_rotary = np.split(numbers, np.cumsum(packed.section_sizes)[:-1])
    decoded = [int(Slots.lengths[slot]) + OFFSETS[slot] for slot in decode]
    first = 20 + (0 if rotary is None else OFFSETS[2])
    expected = [*decoded, first, first + 1, first + 2]
    assert packed_rotary.tolist() == [*expected, *[0] * (16 - len(expected))]
    plain = PackedLayout(16, 8)
    numbers = np.full(plain.size, 77, np.int32)
    PrefillGraphs.pack_batch(make_graphs(has_rotary=False), plain, numbers, plan, layout, np.array([2]))
    assert plain.size == packed.size - 16
    assert np.array_equal(numbers, np.concatenate(others))
