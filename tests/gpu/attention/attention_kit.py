# SPDX-License-Identifier: Apache-2.0
"""A random paged KV cache and mixed batches, for the tests that compare attention backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mizzen.attention.base import (
    AttentionBackend,
    DecodeRows,
    Geometry,
    MixedAttention,
    PagedKV,
    PageTable,
    PlannedAttention,
    QueryChunk,
)
from mizzen.attention.reference import ReferenceAttention
from mizzen.core.request import Int32, Int64

Plan = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], PlannedAttention]
"""Function that plans decode attention from slots, lengths and the page table, all on the device."""

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = 8
LONGEST = 1536
CHUNKS = (
    QueryChunk(slot=3, start=0, count=1),
    QueryChunk(slot=4, start=0, count=333),
    QueryChunk(slot=6, start=777, count=150),
    QueryChunk(slot=7, start=1, count=1),
)


def make_kv(
    geometry: Geometry, page: int, dtype: torch.dtype, stored: torch.dtype | None = None
) -> tuple[PagedKV, PageTable]:
    """Return random KV, and a page table in random order; slot 1 shares the first half of slot 0's pages."""
    columns = LONGEST // page
    torch.manual_seed(page + geometry.head_dim)
    shape = (len(geometry.windows), SLOTS * LONGEST, geometry.kv_heads, geometry.head_dim)
    keys, values = (torch.randn(shape, device=DEVICE, dtype=dtype).to(stored or dtype) for _ in range(2))
    pages = np.random.default_rng(3).permutation(SLOTS * columns).astype(np.int32)
    table = pages.reshape(SLOTS, columns)
    table[1, : columns // 2] = table[0, : columns // 2]
    kv = PagedKV(keys=keys, values=values, page_size=page)
    return kv, PageTable(host=table, device=torch.from_numpy(table).to(DEVICE))


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 6e-3) -> None:
    """Check the relative error by norm (below `tolerance`) and by element (within 5 * `tolerance`)."""
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < tolerance
    torch.testing.assert_close(actual, expected, atol=5 * tolerance, rtol=5 * tolerance)


def check_mixed(
    backend: Any,
    geometry: Geometry,
    kv: PagedKV,
    pages: PageTable,
    dtype: torch.dtype,
    *,
    prefill: Any = None,
    chunks: tuple[QueryChunk, ...] = CHUNKS,
    times: int = 1,
    tolerance: float = 6e-3,
) -> None:
    """Run a batch of decodes and prefill chunks, and compare the results with the reference backend.

    Args:
        backend: backend of the decodes.
        prefill: backend of the prefill chunks; by default, `backend`.
        times: number of times that all layers are run in turn.
        tolerance: upper limit of the relative error of each result, by norm.
    """
    page, reference = kv.page_size, ReferenceAttention(geometry, kv)
    rows = DecodeRows(
        slots=np.array([5, 0, 2, 1]), lengths=np.array([1, 1536, 17, 900], np.int32), pages=pages
    )
    tokens = len(rows.slots) + sum(chunk.count for chunk in chunks)
    q = torch.randn(tokens, geometry.heads, geometry.head_dim, device=DEVICE, dtype=dtype)
    k, v = torch.randn(2, tokens, geometry.kv_heads, geometry.head_dim, device=DEVICE, dtype=dtype)
    slots = np.concatenate([rows.slots, np.repeat([c.slot for c in chunks], [c.count for c in chunks])])
    positions = np.concatenate([rows.lengths - 1, *(np.arange(c.start, c.end) for c in chunks)])
    slot_mapping = pages.host[slots, positions // page].astype(np.int64) * page + positions % page
    slot_mapping_on_device = torch.from_numpy(slot_mapping).to(DEVICE)
    run = MixedAttention(kv, backend, prefill or backend).plan(slot_mapping_on_device, rows, chunks)
    expected = MixedAttention(kv, reference, reference).plan(slot_mapping_on_device, rows, chunks)
    for _ in range(times):
        for layer in range(len(geometry.windows)):
            close(run(layer, q, k, v), expected(layer, q, k, v), tolerance)


class CapturedBatch:
    """A decode batch in a CUDA graph, whose results are compared with the reference at every replay."""

    def __init__(self, backend: AttentionBackend, plan: Plan, pages: PageTable, rows: int) -> None:
        self.geometry, self.pages = backend.geometry, pages
        self.reference = ReferenceAttention(backend.geometry, backend.kv)
        self.slots = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        self.lengths = torch.ones(rows, dtype=torch.int32, device=DEVICE)
        shape = (rows, self.geometry.heads, self.geometry.head_dim)
        self.q = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        self.layers = len(self.geometry.windows)
        self.out = torch.zeros(self.layers, *shape, device=DEVICE, dtype=torch.bfloat16)

        def step() -> None:
            run = plan(self.slots, self.lengths, pages.device)
            for layer in range(self.layers):
                run(layer, self.q, None, None, self.out[layer])

        step()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            step()

    def check(
        self, slots: Int64, lengths: Int32, close: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> None:
        """Replay the graph with these slots [rows] and lengths [rows], and check the outputs.

        `close` compares the output of each layer with that of the reference backend.
        """
        self.slots.copy_(torch.from_numpy(slots.astype(np.int32)))
        self.lengths.copy_(torch.from_numpy(lengths))
        self.out.fill_(float("nan"))
        self.graph.replay()
        expected = torch.empty_like(self.q)
        plan = self.reference.plan_decode(DecodeRows(slots=slots, lengths=lengths, pages=self.pages))
        for layer in range(self.layers):
            plan(layer, self.q, None, None, expected)
            close(self.out[layer], expected)
