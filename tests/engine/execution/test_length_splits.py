# SPDX-License-Identifier: Apache-2.0
"""Length-aware splits of decode attention: the split plan, and which batches use length-aware graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mizzen.core.request import Int32, Int64
from mizzen.engine.execution.decode_graphs import batch_sizes
from mizzen.engine.execution.length_splits import LengthSplitGraphs, equal_on_all_ranks, length_split_sizes
from mizzen.parallel.collectives import SINGLE_RANK, Collectives

pytest.importorskip("triton", reason="this PyTorch comes without Triton")

from mizzen.attention.flash_decode import MIN_WORKSPACE_PROGRAMS, pack_slots_and_lengths
from mizzen.kernels.attention import flash_decode_mma, split_plan

CPU = torch.device("cpu")
SM_COUNTS = (132, 114, 148)
LENGTHS = st.one_of(st.integers(1, 300), st.integers(1, 4000), st.integers(1, 200_000))


def lengths_of(*counts: int) -> Int32:
    return np.array(counts, np.int32)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Int32, int | None, split_plan.SplitSchedule]:
    """Generate the context lengths of a batch, a sliding window (or None), and a split schedule."""
    rows = draw(st.one_of(st.integers(1, 40), st.integers(1, 600)))
    distinct_lengths = draw(st.lists(LENGTHS, min_size=1, max_size=12))
    lengths = np.array(distinct_lengths, np.int32)[
        np.random.default_rng(rows).integers(0, len(distinct_lengths), rows)
    ]
    blocks_per_sm, kv_heads = draw(st.sampled_from((3, 4))), draw(st.sampled_from((1, 2, 3, 8, 40)))
    schedule = split_plan.make_schedule(rows, kv_heads, draw(st.sampled_from(SM_COUNTS)), blocks_per_sm)
    return lengths, draw(st.sampled_from((None, 60, 1024, 5000))), schedule


@given(batches())
def test_a_plan_covers_every_row_exactly_once(
    batch: tuple[Int32, int | None, split_plan.SplitSchedule],
) -> None:
    lengths, window, schedule = batch
    items, (splits, long) = (
        split_plan.plan_reference(lengths, window, schedule),
        split_plan.splits_by_row(lengths, window, schedule),
    )
    assert splits.sum() <= schedule.items == len(items)
    used = items[: splits.sum()]
    long_first = np.argsort(~long, kind="stable")
    assert used[:, 0].tolist() == np.repeat(long_first, splits[long_first]).tolist()
    assert used[:, 1].tolist() == [split for count in splits[long_first] for split in range(count)]
    assert (used[:, 2] == splits[used[:, 0]]).all()
    assert (items[splits.sum() :, 0] == -1).all()


def workspace_indices(items: Int32, kv_heads: int) -> Int64:
    """Return the workspace index at which the kernel stores each partial result of a plan."""
    split = items[(items[:, 0] >= 0) & (items[:, 2] > 1)].astype(np.int64)
    heads = np.arange(kv_heads)[:, None]
    return (split[:, 3] * kv_heads + heads * split[:, 2] + split[:, 1]).ravel()


@given(batches(), st.sampled_from((1, 2, 3, 8, 40)), st.sampled_from(SM_COUNTS), st.sampled_from((3, 4)))
def test_partial_results_do_not_overlap_and_fit_the_workspace(
    batch: tuple[Int32, int | None, split_plan.SplitSchedule],
    kv_heads: int,
    sm_count: int,
    blocks_per_sm: int,
) -> None:
    lengths, window, _ = batch
    schedule = split_plan.make_schedule(len(lengths), kv_heads, sm_count, blocks_per_sm)
    places = workspace_indices(split_plan.plan_reference(lengths, window, schedule), kv_heads)
    assert (
        len(np.unique(places))
        == len(places)
        <= split_plan.max_partial_results(kv_heads, sm_count, blocks_per_sm)
    )
    assert not len(places) or places.max() == len(places) - 1


@pytest.mark.parametrize(
    ("kv_heads", "sm_count", "blocks_per_sm", "rows", "long"),
    [(1, 132, 3, 198, 7), (3, 132, 4, 88, 3), (2, 148, 4, 148, 5)],
)
def test_a_few_long_rows_need_almost_the_whole_workspace(
    kv_heads: int, sm_count: int, blocks_per_sm: int, rows: int, long: int
) -> None:
    schedule = split_plan.make_schedule(rows, kv_heads, sm_count, blocks_per_sm)
    items = split_plan.plan_reference(lengths_of(*[60_007] * long, *[1] * (rows - long)), None, schedule)
    capacity = split_plan.max_partial_results(kv_heads, sm_count, blocks_per_sm)
    assert 0.98 * capacity < workspace_indices(items, kv_heads).max() + 1 <= capacity


def test_the_plan_has_few_unused_work_items() -> None:
    schedule = split_plan.make_schedule(34, 2, 132, 3)
    splits, _ = split_plan.splits_by_row(lengths_of(*[60_000] * 5, *[1] * 29), None, schedule)
    assert splits.sum() == schedule.items - 1


@given(batches())
def test_no_part_is_much_longer_than_a_blocks_share(
    batch: tuple[Int32, int | None, split_plan.SplitSchedule],
) -> None:
    lengths, window, schedule = batch
    splits, long = split_plan.splits_by_row(lengths, window, schedule)
    visible = np.minimum(lengths.astype(np.int64), window or split_plan.NO_WINDOW)
    split_tokens = split_plan.tokens_per_split(int(visible.sum()), schedule.concurrent_blocks)
    assert (splits >= schedule.splits).all() and (splits <= flash_decode_mma.MAX_SPLITS).all()
    assert ((visible <= 2 * split_tokens * splits) | (splits == flash_decode_mma.MAX_SPLITS)).all()
    assert split_plan.is_faster(lengths, window, schedule) == bool(long.any())
    assert (long == (visible > 2 * schedule.splits * split_tokens)).all()


@pytest.mark.parametrize("blocks_per_sm", [3, 4])
@pytest.mark.parametrize("sm_count", SM_COUNTS)
def test_equal_lengths_are_split_as_by_the_plain_plan(sm_count: int, blocks_per_sm: int) -> None:
    for kv_heads in (1, 2, 3, 8, 40):
        for rows in range(1, 600):
            schedule = split_plan.make_schedule(rows, kv_heads, sm_count, blocks_per_sm)
            assert (schedule.splits, schedule.warps) == flash_decode_mma.select_splits(
                rows * kv_heads, sm_count, blocks_per_sm
            )
            for length in (1, 257, 5000, 131072):
                splits, long = split_plan.splits_by_row(np.full(rows, length, np.int32), None, schedule)
                assert (splits == schedule.splits).all() and (
                    schedule.splits == flash_decode_mma.MAX_SPLITS or not long.any()
                )


@pytest.mark.parametrize(
    ("lengths", "splits"),
    [
        (lengths_of(30_000, *[1000] * 95), 12),  # 125,000 tokens on 49 blocks of a head
        (lengths_of(9000, *[500] * 7), 12),
        (lengths_of(30_000, *[1000] * 30, *[1] * 65), 25),  # the rows of length 1 are padding
        (lengths_of(200_000, *[10] * 95), 49),
    ],
)
def test_a_long_row_gets_parts_in_proportion_to_its_length(lengths: Int32, splits: int) -> None:
    schedule = split_plan.make_schedule(len(lengths), 8, 132, 3)
    assert split_plan.is_faster(lengths, None, schedule)
    results, _ = split_plan.splits_by_row(lengths, None, schedule)
    assert (results[0], set(results[1:])) == (splits, {schedule.splits})


def test_tokens_outside_the_window_are_not_split() -> None:
    lengths = lengths_of(30_000, *[1000] * 95)
    schedule = split_plan.make_schedule(96, 8, 132, 3)
    assert not split_plan.is_faster(lengths, 1024, schedule)
    assert split_plan.is_faster(lengths, 8192, schedule)
    assert not split_plan.is_faster(lengths_of(512, *[1] * 95), None, schedule)


def test_the_workspace_is_about_as_large_as_for_equal_parts() -> None:
    assert split_plan.max_partial_results(8, 132, 3) <= MIN_WORKSPACE_PROGRAMS
    assert split_plan.max_partial_results(8, 132, 4) <= 1.1 * MIN_WORKSPACE_PROGRAMS


def test_one_compiled_kernel_reads_batches_of_any_size() -> None:
    for rows in range(1, 10):
        slots, lengths = np.arange(rows) + 5, np.arange(rows, dtype=np.int32) + 70
        packed = pack_slots_and_lengths(slots, lengths)
        assert packed.dtype == np.int32 and not packed.strides[0] % 16 and packed.strides[1] == 4
        assert (packed[0, :rows] == slots).all() and (packed[1, :rows] == lengths).all()


@pytest.mark.parametrize("fused_qkv", [False, True])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_length_aware_decode_kernel_compiles(cache: torch.dtype, fused_qkv: bool) -> None:
    pytest.importorskip("cuda.bindings", reason="this PyTorch comes without CUDA's bindings")
    from mizzen.kernels import nvrtc

    for warps in (4, 8):
        defines = flash_decode_mma.compile_definitions(
            128, 4, 8, 16, None, warps, cache, norm=True, fused_qkv=fused_qkv, planned_splits=True
        )
        assert nvrtc.compile_cubin(flash_decode_mma.SOURCE, "flash_decode_mma", defines, (9, 0))


def test_only_some_batch_sizes_get_length_aware_graphs() -> None:
    assert length_split_sizes(batch_sizes(256)) == [8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert length_split_sizes(batch_sizes(100)) == [8, 16, 24, 32, 48, 64, 96, 100]
    assert length_split_sizes(batch_sizes(640))[-4:] == [256, 384, 512, 640]
    assert length_split_sizes(batch_sizes(7)) == []
    assert length_split_sizes([300]) == [300]


class SplitBackend:
    """A backend without kernels; prefers length-aware splits if a context exceeds twice the mean length."""

    def __init__(self, slots: int = 396) -> None:
        self.concurrent_splits = slots
        self.checked_sizes: list[int] = []

    def length_splits_are_faster(self, rows: int, lengths: Int32) -> bool:
        self.checked_sizes.append(rows)
        return bool(lengths.max() > 2 * lengths.mean())

    def plan_length_splits_on_device(self, *given: Any) -> Any:
        raise NotImplementedError


class FakeCollectives:
    """Fake collectives of one rank; each rank of its group contributes one of `numbers` to an all-reduce."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers, self.size, self.calls = numbers, len(numbers), 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        assert x[0] in self.numbers
        return torch.tensor([sum(self.numbers), sum(number**2 for number in self.numbers)])


def graphs_of(backend: object, sizes: list[int], ranks: object = SINGLE_RANK) -> LengthSplitGraphs:
    return LengthSplitGraphs.for_backend(backend, sizes, cast(Collectives, ranks), CPU)


def test_a_batch_with_uneven_lengths_uses_the_next_larger_length_aware_graph() -> None:
    backend = SplitBackend()
    graphs = graphs_of(backend, batch_sizes(100))
    long, even = [9000], [1000]
    assert graphs.size_for(4, lengths_of(*long, *[10] * 2)) == 8
    assert graphs.size_for(8, lengths_of(*long, *[10] * 7)) == 8
    assert graphs.size_for(40, lengths_of(*[10] * 32, *long)) == 48
    assert graphs.size_for(100, lengths_of(*long, *[10] * 96)) == 100
    assert graphs.size_for(40, lengths_of(*even * 33)) is None
    assert backend.checked_sizes == [4, 8, 40, 100, 40]


def test_other_backends_and_small_batches_use_plain_graphs() -> None:
    mixed_lengths = lengths_of(9000, *[1] * 3)
    for backend, sizes in (
        (SimpleNamespace(), [1, 64]),
        (SplitBackend(0), [1, 64]),
        (SplitBackend(), [1, 2, 4]),
    ):
        graphs = graphs_of(backend, sizes)
        assert graphs.sizes == [] and graphs.size_for(4, mixed_lengths) is None


@pytest.mark.parametrize("numbers", [(396, 396), (396, 342), (0, 396), (396, 0, 396, 396), (0, 0)])
def test_ranks_that_would_choose_differently_use_plain_graphs(numbers: tuple[int, ...]) -> None:
    ranks = FakeCollectives(numbers)
    same = len(set(numbers)) == 1
    for number in set(numbers):
        assert equal_on_all_ranks(number, cast(Collectives, ranks), CPU) == same
        calls = ranks.calls
        graphs = graphs_of(SplitBackend(number), [1, 8], ranks)
        assert (
            ranks.calls == calls + 1
        )  # even a rank that cannot schedule must join, or the others wait for it
        assert graphs.sizes == ([8] if same and number else [])
