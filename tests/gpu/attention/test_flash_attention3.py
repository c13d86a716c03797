# SPDX-License-Identifier: Apache-2.0
"""The fa3 backend equals the reference, over scattered pages, cached prefixes and sliding windows."""

from __future__ import annotations

from dataclasses import replace
from functools import partialmethod

import numpy as np
import pytest
import torch
from attention_kit import SLOTS, CapturedBatch, check_mixed, close, make_kv
from hopper import WITH_FA3

from mizzen.attention.base import DecodeRows, Geometry, PagedKV, QueryChunk
from mizzen.attention.flash_attention3 import FlashAttention3, FreshPrompts
from mizzen.attention.flash_decode import FlashDecodeAttention
from mizzen.attention.reference import ReferenceAttention
from mizzen.attention.registry import make_attention

pytestmark = WITH_FA3
WHOLE_PROMPTS = (
    QueryChunk(slot=3, start=0, count=1),
    QueryChunk(slot=4, start=0, count=333),
    QueryChunk(slot=6, start=0, count=1500),
    QueryChunk(slot=7, start=0, count=16),
)
EIGHT_BITS = 0.08
"""Tolerance with an 8-bit cache. Unlike the reference, the kernels also round queries and softmax weights to
e4m3; each of these two roundings adds an error of about 2.6 %."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_mixed_batches_equal_the_reference(head_dim: int, groups: int, page: int, dtype: torch.dtype) -> None:
    geometry = Geometry(heads=2 * groups, kv_heads=2, head_dim=head_dim, windows=(None, 100))
    kv, pages = make_kv(geometry, page, dtype)
    check_mixed(
        FlashAttention3(geometry, kv), geometry, kv, pages, dtype, times=2
    )  # all layers share one schedule of the kernel


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(("groups", "head_dim"), [(1, 64), (4, 128), (8, 128), (5, 64), (2, 256)])
def test_prompts_without_a_cached_prefix_equal_the_reference(
    groups: int, head_dim: int, page: int, sinks: bool
) -> None:
    geometry = Geometry(heads=2 * groups, kv_heads=2, head_dim=head_dim, windows=(None, 100), has_sinks=sinks)
    kv, pages = make_kv(geometry, page, torch.bfloat16)
    if sinks:
        kv = replace(kv, sinks=torch.randn(2, geometry.heads, device=kv.device).to(torch.bfloat16))
    backend = FlashAttention3(geometry, kv)
    assert isinstance(backend.plan_prefill(WHOLE_PROMPTS, pages), FreshPrompts)
    check_mixed(backend, geometry, kv, pages, torch.bfloat16, chunks=WHOLE_PROMPTS, times=2)


def test_prompts_without_a_cached_prefix_read_the_batch_or_the_cache() -> None:
    geometry = Geometry(heads=8, kv_heads=2, head_dim=128, windows=(None,))
    kv, pages = make_kv(geometry, 16, torch.bfloat16)
    plan = FlashAttention3(geometry, kv).plan_prefill(WHOLE_PROMPTS, pages)
    tokens = sum(chunk.count for chunk in WHOLE_PROMPTS)
    qkv = torch.randn(tokens, 12, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.split((8, 2, 2), dim=1)
    slots = np.repeat([c.slot for c in WHOLE_PROMPTS], [c.count for c in WHOLE_PROMPTS])
    positions = np.concatenate([np.arange(c.count) for c in WHOLE_PROMPTS])
    cells = torch.from_numpy(pages.host[slots, positions // 16].astype(np.int64) * 16 + positions % 16).cuda()
    kv.store(0, cells, k, v)
    cached, batch = torch.empty(2, *q.shape, device="cuda", dtype=torch.bfloat16)
    plan(0, q.contiguous(), None, None, cached)
    kv.keys.fill_(float("nan"))
    kv.values.fill_(float("nan"))
    plan(0, q.contiguous(), k, v, batch)
    close(batch, cached)


@pytest.mark.parametrize("groups", [*range(1, 9), 16])
def test_any_number_of_query_heads_share_a_kv_head(groups: int) -> None:
    geometry = Geometry(heads=2 * groups, kv_heads=2, head_dim=128, windows=(None,))
    kv, pages = make_kv(geometry, 16, torch.bfloat16)
    check_mixed(FlashAttention3(geometry, kv), geometry, kv, pages, torch.bfloat16)


class UnsplitAttention(FlashAttention3):
    """The backend without splits of contexts in plans of sequences."""

    plan_on_device = partialmethod(FlashAttention3.plan_on_device, split=False)  # type: ignore[assignment]


@pytest.mark.parametrize("page", [16, 128])
def test_unsplit_sequences_equal_the_reference(page: int) -> None:
    geometry = Geometry(heads=8, kv_heads=2, head_dim=128, windows=(None, 100))
    kv, pages = make_kv(geometry, page, torch.bfloat16)
    check_mixed(UnsplitAttention(geometry, kv), geometry, kv, pages, torch.bfloat16)


@pytest.mark.parametrize("groups", [1, 4, 5])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_an_8_bit_cache_is_close_to_the_reference(head_dim: int, groups: int) -> None:
    geometry = Geometry(heads=2 * groups, kv_heads=2, head_dim=head_dim, windows=(None, 100))
    kv, pages = make_kv(geometry, 16, torch.bfloat16, torch.float8_e4m3fn)
    check_mixed(FlashAttention3(geometry, kv), geometry, kv, pages, torch.bfloat16, tolerance=EIGHT_BITS)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_captured_batch_follows_its_lengths(rows: int) -> None:
    geometry = Geometry(heads=8, kv_heads=2, head_dim=128, windows=(None, 60))
    kv, pages = make_kv(geometry, 16, torch.bfloat16)
    fa3, rng = FlashAttention3(geometry, kv), np.random.default_rng(0)
    batch = CapturedBatch(fa3, fa3.plan_decode_on_device, pages, rows)
    for longest in (1, 40, 1536):
        slots = rng.integers(0, SLOTS, rows)
        batch.check(slots, rng.integers(1, longest + 1, rows).astype(np.int32), close)


@pytest.mark.parametrize("groups", [1, 8])
def test_attention_sinks_equal_the_reference(groups: int) -> None:
    geometry = Geometry(heads=2 * groups, kv_heads=2, head_dim=64, windows=(None, 100), has_sinks=True)
    kv, pages = make_kv(geometry, 16, torch.bfloat16)
    sinks = torch.randn(2, geometry.heads, device=kv.device).mul_(3).to(torch.bfloat16)
    kv = replace(kv, sinks=sinks)
    check_mixed(FlashAttention3(geometry, kv), geometry, kv, pages, torch.bfloat16)
    attention = make_attention(geometry, kv, prefill="auto", decode="auto")
    assert (type(attention.decode), type(attention.prefill)) == (FlashDecodeAttention, FlashAttention3)


def test_auto_uses_fast_backends_where_supported() -> None:
    fast, slow = (FlashDecodeAttention, FlashAttention3), (ReferenceAttention, ReferenceAttention)
    for dtype, kinds in ((torch.bfloat16, fast), (torch.float32, slow)):
        geometry = Geometry(heads=4, kv_heads=2, head_dim=64, windows=(None,))
        kv, _ = make_kv(geometry, 16, dtype)
        attention = make_attention(geometry, kv, prefill="auto", decode="auto")
        assert (type(attention.decode), type(attention.prefill)) == kinds
    with pytest.raises(ValueError, match="needs bfloat16, float16 or float8, not float32"):
        make_attention(geometry, kv, prefill="auto", decode="fa3")
    with pytest.raises(ValueError, match="supports only decodes"):
        make_attention(geometry, kv, prefill="split", decode="reference")


def test_key_scales_cancel_in_an_8_bit_cache() -> None:
    """Keys divided by a scale and queries multiplied by it give the results of unscaled keys and queries."""
    geometry = Geometry(heads=8, kv_heads=2, head_dim=128, windows=(None, None))
    kv, pages = make_kv(geometry, 16, torch.bfloat16)
    scales = (2.0**-4, 4.0)
    divided = torch.stack([keys / scale for keys, scale in zip(kv.keys, scales, strict=True)])
    stored = [x.to(torch.float8_e4m3fn) for x in (kv.keys, divided, kv.values)]
    plain = FlashAttention3(geometry, PagedKV(keys=stored[0], values=stored[2], page_size=16))
    scaled = FlashAttention3(
        geometry, PagedKV(keys=stored[1], values=stored[2], page_size=16, key_scales=scales)
    )
    rows = DecodeRows(slots=np.array([5, 0, 2]), lengths=np.array([1, 1536, 17], np.int32), pages=pages)
    chunks = (QueryChunk(slot=4, start=0, count=333), QueryChunk(slot=6, start=777, count=150))
    q = torch.randn(3 + 333 + 150, 8, 128, device="cuda", dtype=torch.bfloat16)
    for layer, scale in enumerate(scales):
        for q_rows, plan in (
            (slice(3), lambda backend: backend.plan_decode(rows)),
            (slice(3, None), lambda backend: backend.plan_prefill(chunks, pages)),
        ):
            expected, actual = torch.empty(2, *q[q_rows].shape, device="cuda", dtype=torch.bfloat16)
            plan(plain)(layer, q[q_rows], None, None, expected)
            plan(scaled)(layer, q[q_rows] * scale, None, None, actual)
            torch.testing.assert_close(actual, expected, atol=5e-2, rtol=3e-2)
