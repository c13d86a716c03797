"""Paged KV of random numbers, and mixed batches over it, for the tests that compare attention backends."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mizzen.attention.base import Chunk, DecodeRows, Geometry, MixedAttention, PagedKV, Pages
from mizzen.attention.reference import ReferenceAttention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = 8
LONGEST = 1536
CHUNKS = (
    Chunk(slot=3, start=0, count=1),
    Chunk(slot=4, start=0, count=333),
    Chunk(slot=6, start=777, count=150),
    Chunk(slot=7, start=1, count=1),
)


def make_kv(
    geometry: Geometry, page: int, dtype: torch.dtype, stored: torch.dtype | None = None
) -> tuple[PagedKV, Pages]:
    """Random KV, and pages in a scrambled order; slot 1 begins with half of slot 0's pages."""
    columns = LONGEST // page
    torch.manual_seed(page + geometry.head_dim)
    shape = (len(geometry.windows), SLOTS * LONGEST, geometry.kv_heads, geometry.head_dim)
    keys, values = (torch.randn(shape, device=DEVICE, dtype=dtype).to(stored or dtype) for _ in range(2))
    pages = np.random.default_rng(3).permutation(SLOTS * columns).astype(np.int32)
    table = pages.reshape(SLOTS, columns)
    table[1, : columns // 2] = table[0, : columns // 2]
    kv = PagedKV(keys=keys, values=values, page_size=page)
    return kv, Pages(host=table, device=torch.from_numpy(table).to(DEVICE))


def close(got: torch.Tensor, wanted: torch.Tensor, most: float = 6e-3) -> None:
    """Compare as whole tensors, to within a share, and number by number."""
    error = (got.float() - wanted.float()).norm() / wanted.float().norm()
    assert error < most
    torch.testing.assert_close(got, wanted, atol=5 * most, rtol=5 * most)


def check_mixed(
    backend: Any,
    geometry: Geometry,
    kv: PagedKV,
    pages: Pages,
    dtype: torch.dtype,
    *,
    prefill: Any = None,
    chunks: tuple[Chunk, ...] = CHUNKS,
    times: int = 1,
    most: float = 6e-3,
) -> None:
    """Run decodes and prompts (by `prefill`, or the same backend) in one batch, and compare.

    Layer follows layer, so many times. `most` is the share by which results may differ as a whole.
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
    cells = pages.host[slots, positions // page].astype(np.int64) * page + positions % page
    where = torch.from_numpy(cells).to(DEVICE)
    got = MixedAttention(kv, backend, prefill or backend).plan(where, rows, chunks)
    wanted = MixedAttention(kv, reference, reference).plan(where, rows, chunks)
    for _ in range(times):
        for layer in range(len(geometry.windows)):
            close(got(layer, q, k, v), wanted(layer, q, k, v), most)
