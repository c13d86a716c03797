# SPDX-License-Identifier: Apache-2.0
"""The CPU backend equals the reference, over page tables of every kind."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.attention.base import AttentionBackend, DecodeRows, Geometry, PagedKV, PageTable, QueryChunk
from mizzen.attention.cpu import CpuAttention, CpuDecode, CpuPrefill
from mizzen.attention.prefix_spans import find_shared_spans
from mizzen.attention.reference import ReferenceAttention

PAGE = 16
COLUMNS = 24


def make_table(rng: np.random.Generator, rows: int, shared_pages: list[int], scattered: bool) -> np.ndarray:
    """Make a page table [rows, pages].

    Args:
        shared_pages: how many pages all rows share, then how many more each half of the rows shares, then
            each quarter, and so on.
        scattered: whether the page numbers are in random order.
    """
    pool = rng.permutation(1024) if scattered else np.arange(1024)
    table = np.zeros((rows, COLUMNS), np.int32)
    next_page = iter(pool)

    def fill(group: list[int], column: int, level: int) -> None:
        if not group:
            return
        if level == len(shared_pages):
            for row in group:
                table[row, column:] = [next(next_page) for _ in range(COLUMNS - column)]
            return
        pages = [next(next_page) for _ in range(shared_pages[level])]
        for row in group:
            table[row, column : column + len(pages)] = pages
        half = len(group) // 2
        fill(group[:half], column + len(pages), level + 1)
        fill(group[half:], column + len(pages), level + 1)

    fill([int(row) for row in rng.permutation(rows)], 0, 0)
    return table


@pytest.fixture(params=[1, 3])
def backends(request: pytest.FixtureRequest) -> Iterator[tuple[AttentionBackend, AttentionBackend]]:
    """The reference and the CPU backend over the same random KV."""
    geometry = Geometry(heads=2 * request.param, kv_heads=2, head_dim=8, windows=(None, 40))
    torch.manual_seed(1)
    keys, values = torch.randn(2, 2, 1024 * PAGE, 2, 8)
    kv = PagedKV(keys=keys, values=values, page_size=PAGE)
    yield ReferenceAttention(geometry, kv), CpuAttention(geometry, kv)


CASES = [
    pytest.param([], False, id="runs"),
    pytest.param([], True, id="scattered"),
    pytest.param([12], False, id="shared"),
    pytest.param([12], True, id="shared-scattered"),
    pytest.param([6, 6], False, id="two-levels"),
    pytest.param([0, 9], False, id="two-groups"),
]


@pytest.mark.parametrize(("shared_pages", "scattered"), CASES)
@pytest.mark.parametrize("rows", [1, 9])
def test_decodes_equal_the_reference(backends, shared_pages: list[int], scattered: bool, rows: int) -> None:
    rng = np.random.default_rng(rows)
    table = make_table(rng, rows, shared_pages, scattered)
    lengths = rng.integers(1, COLUMNS * PAGE, rows).astype(np.int32)
    lengths[0] = COLUMNS * PAGE
    lengths[-1] = PAGE * (sum(shared_pages) or 2)
    batch = DecodeRows(
        slots=rng.permutation(rows),
        lengths=lengths,
        pages=PageTable(host=table, device=torch.from_numpy(table)),
    )
    reference, cpu = backends
    geometry = reference.geometry
    q, k, v = torch.randn(3, rows, geometry.heads, geometry.head_dim)
    for layer in range(len(geometry.windows)):
        out = [torch.empty_like(q), torch.empty_like(q)]
        for backend, into in zip(backends, out, strict=True):
            backend.plan_decode(batch)(layer, q, k, v, into)
        torch.testing.assert_close(out[1], out[0], atol=1e-5, rtol=1e-5)
    run = CpuDecode(geometry, cpu.kv, batch)
    assert rows == 1 or shared_pages or bool(run.spans.spans) != scattered


@pytest.mark.parametrize(("shared_pages", "scattered"), CASES)
@pytest.mark.parametrize("rows", [1, 5])
def test_prefill_chunks_equal_the_reference(
    backends, shared_pages: list[int], scattered: bool, rows: int
) -> None:
    rng = np.random.default_rng(rows)
    table = make_table(rng, rows, shared_pages, scattered)
    # Chunks write their own KV, so no two rows may share the pages that are written.
    starts = rng.integers(PAGE * sum(shared_pages), COLUMNS * PAGE - 40, rows)
    starts[0] = PAGE * (sum(shared_pages) or 2)
    chunks = tuple(
        QueryChunk(slot=int(slot), start=int(start), count=int(count))
        for slot, start, count in zip(rng.permutation(rows), starts, rng.integers(1, 40, rows), strict=True)
    )
    pages = PageTable(host=table, device=torch.from_numpy(table))
    reference, _ = backends
    geometry, kv = reference.geometry, reference.kv
    total = sum(chunk.count for chunk in chunks)
    q = torch.randn(total, geometry.heads, geometry.head_dim)
    k, v = torch.randn(2, total, geometry.kv_heads, geometry.head_dim)
    cells = np.concatenate(
        [
            table[c.slot, np.arange(c.start, c.end) // PAGE] * PAGE + np.arange(c.start, c.end) % PAGE
            for c in chunks
        ]
    )
    for layer in range(len(geometry.windows)):
        kv.store(layer, torch.from_numpy(cells.astype(np.int64)), k, v)
        out = [torch.empty_like(q), torch.empty_like(q)]
        for backend, into in zip(backends, out, strict=True):
            backend.plan_prefill(chunks, pages)(layer, q, k, v, into)
        torch.testing.assert_close(out[1], out[0], atol=1e-5, rtol=1e-5)
    assert CpuPrefill(geometry, kv, chunks, pages).levels > 1


def test_first_chunks_are_not_merged(backends) -> None:
    reference, _ = backends
    table = np.arange(COLUMNS, dtype=np.int32)[None]
    pages = PageTable(host=table, device=torch.from_numpy(table))
    run = CpuPrefill(reference.geometry, reference.kv, (QueryChunk(slot=0, start=0, count=9),), pages)
    assert run.levels == 1


@given(data=st.data())
@settings(max_examples=60)
def test_spans_and_leftovers_cover_each_token_exactly_once(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 6))
    share = data.draw(st.lists(st.integers(0, 8), max_size=2))
    seed = data.draw(st.integers(0, 1000))
    rng = np.random.default_rng(seed)
    table = make_table(rng, rows, share, data.draw(st.booleans()))
    lengths = np.array(data.draw(st.lists(st.integers(1, COLUMNS * PAGE), min_size=rows, max_size=rows)))
    keep_last = data.draw(st.booleans())
    slots = rng.permutation(rows)
    cut = find_shared_spans(table, slots, lengths, PAGE, keep_last)
    assert sorted(cut.order.tolist()) == list(range(rows))
    for place, row in enumerate(cut.order):
        positions = np.arange(lengths[row])
        expected = table[slots[row], positions // PAGE] * PAGE + positions % PAGE
        covered = [span for span in cut.spans if span.first <= place < span.last]
        read = [np.arange(span.start, span.start + span.count) for span in covered]
        assert sorted(np.concatenate([*read, cut.leftover[place]]).tolist()) == sorted(expected.tolist())
        assert len({span.level for span in covered}) == len(covered)
        assert all(0 < span.level < cut.levels for span in covered)
        assert not keep_last or expected[-1] in cut.leftover[place]
