# SPDX-License-Identifier: Apache-2.0
"""Planners of captured batches give every decode and every chunk the attention of its own sequence."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from mizzen.attention import mixed_batches
from mizzen.attention.base import Geometry, PagedKV, PageTable, PlannedAttention, QueryChunk
from mizzen.attention.mixed_batches import (
    DeviceBatch,
    MixedPlanner,
    choose_planners,
    plan_as_sequences,
    plan_decodes_apart,
    select_planners,
)
from mizzen.attention.reference import ReferenceAttention

PAGE, COLUMNS, SLOTS = 4, 8, 5
SCRATCH = SLOTS
GEOMETRY = Geometry(heads=4, kv_heads=2, head_dim=8, windows=(None, 6))
TOKENS = 24


class DevicePlanned(ReferenceAttention):
    """The reference backend, planned from tensors; it leaves rows without a query as they are."""

    def __init__(self, kv: PagedKV, pages: PageTable) -> None:
        super().__init__(GEOMETRY, kv)
        self.pages = pages
        self.decode_lengths: list[int] = []
        """Lengths of the rows of the last planned decodes."""
        self.sequences = 0
        """Number of sequences of the last plan."""
        self.split = False
        """Whether the contexts of the last plan may be split."""

    def plan_sequences(self, starts: list[int], slots: list[int], lengths: list[int]) -> PlannedAttention:
        counts = [end - start for start, end in pairwise(starts)]
        used = [i for i, count in enumerate(counts) if 0 < count <= lengths[i]]
        chunks = [QueryChunk(slot=slots[i], start=lengths[i] - counts[i], count=counts[i]) for i in used]
        planned = [self.plan_prefill((chunk,), self.pages) for chunk in chunks]

        def run(layer: int, q: torch.Tensor, k: object, v: object, out: torch.Tensor) -> None:
            for i, plan in zip(used, planned, strict=True):
                rows = slice(starts[i], starts[i + 1])
                plan(layer, q[rows], k, v, out[rows])

        return run

    def plan_on_device(
        self,
        starts: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
        longest: int,
        *,
        split: bool = True,
    ) -> PlannedAttention:
        self.sequences, self.split = len(slots), split
        assert starts.dtype == slots.dtype == lengths.dtype == torch.int32 and longest == TOKENS
        assert int(lengths.min()) >= 1 and bool((starts.diff() >= 0).all())
        return self.plan_sequences(starts.tolist(), slots.tolist(), lengths.tolist())

    def plan_decode_on_device(
        self, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> PlannedAttention:
        assert slots.dtype == lengths.dtype == torch.int32
        self.decode_lengths = lengths.tolist()
        return self.plan_sequences([*range(len(slots) + 1)], slots.tolist(), lengths.tolist())


def make_backend() -> DevicePlanned:
    torch.manual_seed(0)
    shape = (2, (SLOTS * COLUMNS + 1) * PAGE, GEOMETRY.kv_heads, GEOMETRY.head_dim)
    table = np.random.default_rng(0).permutation(SLOTS * COLUMNS).astype(np.int32).reshape(SLOTS, COLUMNS)
    table = np.concatenate([table, np.full((1, COLUMNS), SLOTS * COLUMNS, np.int32)])
    pages = PageTable(host=table, device=torch.from_numpy(table))
    return DevicePlanned(PagedKV(keys=torch.randn(shape), values=torch.randn(shape), page_size=PAGE), pages)


def make_batch(decodes: list[tuple[int, int]], chunks: list[QueryChunk], table: torch.Tensor) -> DeviceBatch:
    """Return a batch of decodes (slot, length) and chunks, as `PrefillGraphs` packs it."""
    slots = [slot for slot, _ in decodes] + [chunk.slot for chunk in chunks for _ in range(chunk.count)]
    positions = [length - 1 for _, length in decodes]
    positions += [position for chunk in chunks for position in range(chunk.start, chunk.end)]
    padding = TOKENS - len(slots)
    starts = [*range(len(decodes)), *(len(decodes) + np.cumsum([0, *(chunk.count for chunk in chunks)]))]
    ints = {
        "slots": slots + [SCRATCH] * padding,
        "positions": positions + [0] * padding,
        "starts": starts + [TOKENS] * (SLOTS + 2 - len(starts)),
        "sequence_slots": [slot for slot, _ in decodes] + [chunk.slot for chunk in chunks],
        "lengths": [length for _, length in decodes] + [chunk.end for chunk in chunks],
    }
    ints["sequence_slots"] += [SCRATCH] * (SLOTS + 1 - len(ints["sequence_slots"]))
    ints["lengths"] += [1] * (SLOTS + 1 - len(ints["lengths"]))
    return DeviceBatch(
        is_decode=torch.arange(TOKENS) < len(decodes),
        table=table,
        scratch_slot=SCRATCH,
        **{name: torch.tensor(np.array(numbers), dtype=torch.int32) for name, numbers in ints.items()},
    )


CHUNKS = [QueryChunk(slot=2, start=0, count=9), QueryChunk(slot=4, start=7, count=1)]


@pytest.mark.parametrize("most", [3, SLOTS, TOKENS + 1])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("max_chunks", [None, 2, SLOTS - 1, SLOTS])
@pytest.mark.parametrize(
    ("decodes", "chunks"),
    [
        ([(3, 1), (0, 30), (1, 6)], CHUNKS),
        ([(3, 1), (0, 30), (1, 6)], CHUNKS[:1]),
        ([], CHUNKS),
        ([(1, 13)], [QueryChunk(slot=0, start=3, count=TOKENS - 1)]),  # no padding
    ],
)
def test_each_sequence_has_its_own_attention(
    decodes: list[tuple[int, int]], chunks: list[QueryChunk], apart: bool, most: int, max_chunks: int | None
) -> None:
    backend = make_backend()
    planner: MixedPlanner = plan_as_sequences(backend)
    if apart:
        planner = plan_decodes_apart(backend, backend, most, split_by_length=False, max_chunks=max_chunks)
    plan = planner(make_batch(decodes, chunks, backend.pages.device))
    q = torch.randn(TOKENS, GEOMETRY.heads, GEOMETRY.head_dim)
    sequences = [QueryChunk(slot=slot, start=length - 1, count=1) for slot, length in decodes] + chunks
    count = sum(chunk.count for chunk in sequences)
    for layer in range(2):
        out, expected = torch.full_like(q, torch.nan), torch.empty_like(q[:count])
        backend.plan_prefill(tuple(sequences), backend.pages)(layer, q[:count], None, None, expected)
        plan(layer, q, None, None, out)
        torch.testing.assert_close(out[:count], expected)
    if apart:
        rows = min(most, TOKENS)
        assert backend.decode_lengths == [length for _, length in decodes] + [1] * (rows - len(decodes))
        assert backend.sequences == min((max_chunks or SLOTS) + 1, SLOTS + 1)
        assert backend.split == (max_chunks is not None)


def test_padding_is_one_of_the_sequences_of_few_chunks() -> None:
    backend = make_backend()
    planner = plan_decodes_apart(backend, backend, 3, split_by_length=False, max_chunks=2)
    q = torch.randn(TOKENS, GEOMETRY.heads, GEOMETRY.head_dim)
    out = torch.full_like(q, torch.nan)
    batch = make_batch([(0, 9)], [QueryChunk(slot=2, start=0, count=TOKENS - 2)], backend.pages.device)
    planner(batch)(0, q, None, None, out)
    assert bool(torch.isfinite(out).all())


def test_length_aware_splits_need_a_backend_that_supports_them() -> None:
    backend = make_backend()
    with pytest.raises(ValueError, match="does not support length-aware splits"):
        plan_decodes_apart(backend, backend, 3, split_by_length=True)


def test_the_first_planner_that_the_backends_support_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend()
    monkeypatch.setattr(mixed_batches, "PREFERRED_PLANNERS", ("apart-by-length", "apart", "sequences"))
    batch = make_batch([(0, 9)], CHUNKS, backend.pages.device)
    planners = choose_planners(backend, backend, 3)
    planners.any_chunks(batch)
    assert backend.decode_lengths == [9, 1, 1] and not backend.split
    assert planners.few_chunks is not None
    planners.few_chunks(batch)
    assert backend.split
    host_planned = ReferenceAttention(GEOMETRY, backend.kv)
    planners = choose_planners(backend, host_planned, 3)
    planners.any_chunks(batch)
    assert backend.sequences == SLOTS + 1 and planners.few_chunks is None
    with pytest.raises(ValueError, match="apart: the prefill backend needs lengths on the host"):
        choose_planners(host_planned, backend, 3)
    with pytest.raises(ValueError, match="unknown planner 'fast'"):
        select_planners(backend, backend, 3, "fast")
