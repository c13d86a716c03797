# SPDX-License-Identifier: Apache-2.0
"""The flashinfer backends equal the reference, over scattered pages, cached prefixes and sliding windows.

With MIZZEN_COMPILE=1, as in `make test-gpu`, kernels that are missing in the package are compiled first, in
parallel, which takes some minutes. Without it, the tests that need these kernels are skipped.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_kit import CHUNKS, SLOTS, check_mixed, close, make_kv
from flashinfer_kit import BF16, FP8, HEAD_DIMS, TEMPLATES, need
from hopper import on_hopper

from mizzen.attention.base import DecodeRows, Geometry
from mizzen.attention.flashinfer import FlashInferAttention
from mizzen.attention.reference import ReferenceAttention
from mizzen.attention.registry import make_attention

pytestmark = on_hopper("flashinfer", "flashinfer-python")


def check(template: str, geometry: Geometry, page: int, stored: torch.dtype = BF16) -> None:
    """Run mixed batches one after the other, as an engine does, and compare them with the reference."""
    kv, pages = make_kv(geometry, page, BF16, stored)
    backend = FlashInferAttention(geometry, kv, template)
    for chunks in (CHUNKS, CHUNKS[1:2], CHUNKS[2:]):
        check_mixed(backend, geometry, kv, pages, BF16, chunks=chunks)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("windows", [(None,), (None, 100)], ids=["full", "window"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_mixed_batches_equal_the_reference(
    template: str, head_dim: int, windows: tuple[int | None, ...], groups: int, page: int
) -> None:
    for window in windows:
        need(template, head_dim, window is not None)
    check(template, Geometry(heads=2 * groups, kv_heads=2, head_dim=head_dim, windows=windows), page)


@pytest.mark.parametrize("groups", [*range(1, 9), 16])
@pytest.mark.parametrize("template", TEMPLATES)
def test_any_number_of_query_heads_share_a_kv_head(template: str, groups: int) -> None:
    need(template, 128, window=False)
    check(template, Geometry(heads=2 * groups, kv_heads=2, head_dim=128, windows=(None,)), 16)


@pytest.mark.parametrize("groups", [1, 4, 5])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_an_8_bit_cache_is_close_to_the_reference(head_dim: int, groups: int) -> None:
    """The tolerance equals that of 16-bit caches: kernels convert keys and values to the queries' type."""
    need("fa2", head_dim, window=False, stored=FP8)
    check("fa2", Geometry(heads=2 * groups, kv_heads=2, head_dim=head_dim, windows=(None,)), 16, FP8)


@pytest.mark.parametrize("windows", [(None,), (None, 60)], ids=["full", "window"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_captured_batches_follow_their_lengths(template: str, windows: tuple[int | None, ...]) -> None:
    for window in windows:
        need(template, 128, window is not None)
    geometry = Geometry(heads=8, kv_heads=2, head_dim=128, windows=windows)
    kv, pages = make_kv(geometry, 16, BF16)
    backend, reference = FlashInferAttention(geometry, kv, template), ReferenceAttention(geometry, kv)
    rng = np.random.default_rng(0)
    sizes = (200, 8, 1)
    slots = torch.zeros(sizes[0], dtype=torch.int32, device="cuda")
    lengths = torch.ones(sizes[0], dtype=torch.int32, device="cuda")
    q = torch.randn(sizes[0], 8, 128, device="cuda", dtype=BF16)
    out = torch.zeros(len(windows), *q.shape, device="cuda", dtype=BF16)
    graphs = {}

    def step(rows: int) -> None:
        run = backend.plan_decode_on_device(slots[:rows], lengths[:rows], pages.device)
        for layer in range(len(windows)):
            run(layer, q[:rows], None, None, out[layer, :rows])

    for rows in sizes:
        step(rows)
        graphs[rows] = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graphs[rows]):
            step(rows)
    for longest in (1, 40, 1536, 300):
        for rows in sizes:
            chosen_slots = rng.integers(0, SLOTS, rows)
            counts = rng.integers(1, longest + 1, rows).astype(np.int32)
            used = rows - rows // 4  # the remaining rows are padding
            counts[used:] = 1
            slots[:rows].copy_(torch.from_numpy(chosen_slots.astype(np.int32)))
            lengths[:rows].copy_(torch.from_numpy(counts))
            out.fill_(float("nan"))
            backend.refresh(rows, counts[:used])
            graphs[rows].replay()
            plan = reference.plan_decode(DecodeRows(slots=chosen_slots, lengths=counts, pages=pages))
            for layer in range(len(windows)):
                expected = torch.empty_like(q[:rows])
                plan(layer, q[:rows], None, None, expected)
                close(out[layer, :rows], expected)


def test_unsupported_choices_are_named() -> None:
    odd = Geometry(heads=4, kv_heads=2, head_dim=96, windows=(None,))
    with pytest.raises(ValueError, match=r"head_dim must be one of \(64, 128, 256\), not 96"):
        make_attention(odd, make_kv(odd, 16, BF16)[0], prefill="flashinfer", decode="reference")
    geometry = Geometry(heads=4, kv_heads=2, head_dim=64, windows=(None,))
    kv, _ = make_kv(geometry, 16, BF16, FP8)
    with pytest.raises(ValueError, match="bfloat16 or float16, not float8_e4m3fn"):
        make_attention(geometry, kv, prefill="reference", decode="flashinfer-fa3")
