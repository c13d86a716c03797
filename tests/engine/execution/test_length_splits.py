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
PROCESSORS = (132, 114, 148)
LENGTHS = st.one_of(st.integers(1, 300), st.integers(1, 4000), st.integers(1, 200_000))


def lengths_of(*counts: int) -> Int32:
    return np.array(counts, np.int32)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Int32, int | None, split_plan.Cut]:
    """Strategy of batch lengths in any order, a window, and split settings."""
    rows = draw(st.one_of(st.integers(1, 40), st.integers(1, 600)))
    few = draw(st.lists(LENGTHS, min_size=1, max_size=12))
    lengths = np.array(few, np.int32)[np.random.default_rng(rows).integers(0, len(few), rows)]
    resident, kv_heads = draw(st.sampled_from((3, 4))), draw(st.sampled_from((1, 2, 3, 8, 40)))
    cut = split_plan.make_schedule(rows, kv_heads, draw(st.sampled_from(PROCESSORS)), resident)
    return lengths, draw(st.sampled_from((None, 60, 1024, 5000))), cut


@given(batches())
def test_a_plan_covers_every_row_exactly_once(batch: tuple[Int32, int | None, split_plan.Cut]) -> None:
    lengths, window, cut = batch
    items, (parts, long) = split_plan.planned(lengths, window, cut), split_plan.parts_of(lengths, window, cut)
    assert parts.sum() <= cut.items == len(items)
    used = items[: parts.sum()]
    long_first = np.argsort(~long, kind="stable")
    assert used[:, 0].tolist() == np.repeat(long_first, parts[long_first]).tolist()
    assert used[:, 1].tolist() == [part for count in parts[long_first] for part in range(count)]
    assert (used[:, 2] == parts[used[:, 0]]).all()
    assert (items[parts.sum() :, 0] == -1).all()


def places_of(items: Int32, kv_heads: int) -> Int64:
    """Return where the kernel stores the partial results of a plan."""
    split = items[(items[:, 0] >= 0) & (items[:, 2] > 1)].astype(np.int64)
    heads = np.arange(kv_heads)[:, None]
    return (split[:, 3] * kv_heads + heads * split[:, 2] + split[:, 1]).ravel()


@given(batches(), st.sampled_from((1, 2, 3, 8, 40)), st.sampled_from(PROCESSORS), st.sampled_from((3, 4)))
def test_partial_results_do_not_overlap_and_fit_the_workspace(
    batch: tuple[Int32, int | None, split_plan.Cut], kv_heads: int, processors: int, resident: int
) -> None:
    lengths, window, _ = batch
    cut = split_plan.make_schedule(len(lengths), kv_heads, processors, resident)
    places = places_of(split_plan.planned(lengths, window, cut), kv_heads)
    assert len(np.unique(places)) == len(places) <= split_plan.max_partial_results(kv_heads, processors, resident)
    assert not len(places) or places.max() == len(places) - 1


@pytest.mark.parametrize(
    ("kv_heads", "processors", "resident", "rows", "long"),
    [(1, 132, 3, 198, 7), (3, 132, 4, 88, 3), (2, 148, 4, 148, 5)],
)
def test_a_few_long_rows_need_almost_the_whole_workspace(
    kv_heads: int, processors: int, resident: int, rows: int, long: int
) -> None:
    cut = split_plan.make_schedule(rows, kv_heads, processors, resident)
    items = split_plan.planned(lengths_of(*[60_007] * long, *[1] * (rows - long)), None, cut)
    room = split_plan.max_partial_results(kv_heads, processors, resident)
    assert 0.98 * room < places_of(items, kv_heads).max() + 1 <= room


def test_the_plan_has_few_unused_work_items() -> None:
    cut = split_plan.make_schedule(34, 2, 132, 3)
    parts, _ = split_plan.parts_of(lengths_of(*[60_000] * 5, *[1] * 29), None, cut)
    assert parts.sum() == cut.items - 1


@given(batches())
def test_no_part_is_much_longer_than_a_blocks_share(
    batch: tuple[Int32, int | None, split_plan.Cut],
) -> None:
    lengths, window, cut = batch
    parts, long = split_plan.parts_of(lengths, window, cut)
    seen = np.minimum(lengths.astype(np.int64), window or split_plan.ENDLESS)
    share = split_plan.share_of(int(seen.sum()), cut.shares)
    assert (parts >= cut.parts).all() and (parts <= flash_decode_mma.MOST).all()
    assert ((seen <= 2 * share * parts) | (parts == flash_decode_mma.MOST)).all()
    assert split_plan.pays(lengths, window, cut) == bool(long.any())
    assert (long == (seen > 2 * cut.parts * share)).all()


@pytest.mark.parametrize("resident", [3, 4])
@pytest.mark.parametrize("processors", PROCESSORS)
def test_equal_lengths_are_split_as_by_the_plain_plan(processors: int, resident: int) -> None:
    for kv_heads in (1, 2, 3, 8, 40):
        for rows in range(1, 600):
            cut = split_plan.make_schedule(rows, kv_heads, processors, resident)
            assert (cut.parts, cut.warps) == flash_decode_mma.cut_of(rows * kv_heads, processors, resident)
            for length in (1, 257, 5000, 131072):
                parts, long = split_plan.parts_of(np.full(rows, length, np.int32), None, cut)
                assert (parts == cut.parts).all() and (cut.parts == flash_decode_mma.MOST or not long.any())


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        (lengths_of(30_000, *[1000] * 95), 12),  # 125,000 tokens on 49 blocks of a head
        (lengths_of(9000, *[500] * 7), 12),
        (lengths_of(30_000, *[1000] * 30, *[1] * 65), 25),  # rows of padding
        (lengths_of(200_000, *[10] * 95), 49),
    ],
)
def test_a_long_row_gets_parts_in_proportion_to_its_length(lengths: Int32, parts: int) -> None:
    cut = split_plan.make_schedule(len(lengths), 8, 132, 3)
    assert split_plan.pays(lengths, None, cut)
    found, _ = split_plan.parts_of(lengths, None, cut)
    assert (found[0], set(found[1:])) == (parts, {cut.parts})


def test_tokens_outside_the_window_are_not_split() -> None:
    lengths = lengths_of(30_000, *[1000] * 95)
    cut = split_plan.make_schedule(96, 8, 132, 3)
    assert not split_plan.pays(lengths, 1024, cut)
    assert split_plan.pays(lengths, 8192, cut)
    assert not split_plan.pays(lengths_of(512, *[1] * 95), None, cut)


def test_the_workspace_is_about_as_large_as_for_equal_parts() -> None:
    assert split_plan.max_partial_results(8, 132, 3) <= MIN_WORKSPACE_PROGRAMS
    assert split_plan.max_partial_results(8, 132, 4) <= 1.1 * MIN_WORKSPACE_PROGRAMS


def test_one_compiled_kernel_reads_batches_of_any_size() -> None:
    for rows in range(1, 10):
        slots, lengths = np.arange(rows) + 5, np.arange(rows, dtype=np.int32) + 70
        sent = pack_slots_and_lengths(slots, lengths)
        assert sent.dtype == np.int32 and not sent.strides[0] % 16 and sent.strides[1] == 4
        assert (sent[0, :rows] == slots).all() and (sent[1, :rows] == lengths).all()


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_kernel_compiles(cache: torch.dtype, projected: bool) -> None:
    pytest.importorskip("cuda.bindings", reason="this PyTorch comes without CUDA's bindings")
    from mizzen.kernels import nvrtc

    for warps in (4, 8):
        defines = flash_decode_mma.definitions(
            128, 4, 8, 16, None, warps, cache, norm=True, projected=projected, uneven=True
        )
        assert nvrtc.compile_cubin(flash_decode_mma.SOURCE, "paged", defines, (9, 0))


def test_only_some_batch_sizes_get_length_aware_graphs() -> None:
    assert length_split_sizes(batch_sizes(256)) == [8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert length_split_sizes(batch_sizes(100)) == [8, 16, 24, 32, 48, 64, 96, 100]
    assert length_split_sizes(batch_sizes(640))[-4:] == [256, 384, 512, 640]
    assert length_split_sizes(batch_sizes(7)) == []
    assert length_split_sizes([300]) == [300]


class Backend:
    """A backend whose batches are uneven from twice the mean length on; it runs nothing."""

    def __init__(self, slots: int = 396) -> None:
        self.concurrent_splits = slots
        self.asked: list[int] = []

    def length_splits_are_faster(self, rows: int, lengths: Int32) -> bool:
        self.asked.append(rows)
        return bool(lengths.max() > 2 * lengths.mean())

    def plan_length_splits_on_device(self, *given: Any) -> Any:
        raise NotImplementedError


class Ranks:
    """Ranks with the given numbers, as seen by one of them."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers, self.size, self.calls = numbers, len(numbers), 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        assert x[0] in self.numbers
        return torch.tensor([sum(self.numbers), sum(number**2 for number in self.numbers)])


def graphs_of(backend: object, sizes: list[int], ranks: object = SINGLE_RANK) -> LengthSplitGraphs:
    return LengthSplitGraphs.for_backend(backend, sizes, cast(Collectives, ranks), CPU)


def test_an_uneven_batch_uses_the_next_larger_length_aware_graph() -> None:
    backend = Backend()
    graphs = graphs_of(backend, batch_sizes(100))
    long, even = [9000], [1000]
    assert graphs.size_for(4, lengths_of(*long, *[10] * 2)) == 8
    assert graphs.size_for(8, lengths_of(*long, *[10] * 7)) == 8
    assert graphs.size_for(40, lengths_of(*[10] * 32, *long)) == 48
    assert graphs.size_for(100, lengths_of(*long, *[10] * 96)) == 100
    assert graphs.size_for(40, lengths_of(*even * 33)) is None
    assert backend.asked == [4, 8, 40, 100, 40]


def test_other_backends_and_small_batches_use_plain_graphs() -> None:
    uneven_batch = lengths_of(9000, *[1] * 3)
    for backend, sizes in ((SimpleNamespace(), [1, 64]), (Backend(0), [1, 64]), (Backend(), [1, 2, 4])):
        graphs = graphs_of(backend, sizes)
        assert graphs.sizes == [] and graphs.size_for(4, uneven_batch) is None


@pytest.mark.parametrize("numbers", [(396, 396), (396, 342), (0, 396), (396, 0, 396, 396), (0, 0)])
def test_ranks_that_would_choose_differently_use_plain_graphs(numbers: tuple[int, ...]) -> None:
    ranks = Ranks(numbers)
    same = len(set(numbers)) == 1
    for number in set(numbers):
        assert equal_on_all_ranks(number, cast(Collectives, ranks), CPU) == same
        calls = ranks.calls
        graphs = graphs_of(Backend(number), [1, 8], ranks)
        assert ranks.calls == calls + 1  # the others wait for a rank that cannot cut, too
        assert graphs.sizes == ([8] if same and number else [])
