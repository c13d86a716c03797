"""The flashinfer backends equal the reference, over scattered pages, cached prefixes and sliding windows.

Kernels that the package does not bring along are compiled first, all at once and for some minutes: with
MIZZEN_COMPILE=1 alone; without it, the cases that need them are skipped.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch

from mizzen.attention.base import Chunk, DecodeRows, Geometry, MixedAttention, PagedKV, Pages
from mizzen.attention.flashinfer import FlashInferAttention
from mizzen.attention.reference import ReferenceAttention
from mizzen.attention.registry import make_attention

GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not GPU or importlib.util.find_spec("flashinfer") is None,
        reason="needs a Hopper GPU with flashinfer-python",
    ),
]
SLOTS = 8
LONGEST = 1536
HEAD_DIMS = (64, 128, 256)
TEMPLATES = ("fa2", "fa3")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def specification(template: str, head_dim: int, window: bool, stored: torch.dtype = BF16) -> Any:
    from flashinfer.jit.attention import gen_batch_prefill_module

    return gen_batch_prefill_module(
        template, BF16, stored, BF16, torch.int32, head_dim, head_dim, 0, window, False, False
    )


@functools.cache
def compile_all() -> None:
    from flashinfer.jit import build_jit_specs

    wanted = [
        specification(template, head_dim, window)
        for template in TEMPLATES
        for head_dim in HEAD_DIMS
        for window in (False, True)
    ]
    wanted += [specification("fa2", 128, window, FP8) for window in (False, True)]
    build_jit_specs([spec for spec in wanted if not spec.is_aot], verbose=False, skip_prebuilt=False)


def need(template: str, head_dim: int, window: bool, stored: torch.dtype = BF16) -> None:
    if os.environ.get("MIZZEN_COMPILE"):
        compile_all()
        return
    spec = specification(template, head_dim, window, stored)
    if not spec.is_aot and not spec.is_compiled:
        pytest.skip("its kernels are not compiled; MIZZEN_COMPILE=1 compiles them")


def make_kv(geometry: Geometry, page: int, stored: torch.dtype = BF16) -> tuple[PagedKV, Pages]:
    """Random KV, and pages in a scrambled order; slot 1 begins with half of slot 0's pages."""
    columns = LONGEST // page
    torch.manual_seed(page + geometry.head_dim)
    shape = (len(geometry.windows), SLOTS * LONGEST, geometry.kv_heads, geometry.head_dim)
    keys, values = (torch.randn(shape, device="cuda", dtype=BF16).to(stored) for _ in range(2))
    pages = np.random.default_rng(3).permutation(SLOTS * columns).astype(np.int32)
    table = pages.reshape(SLOTS, columns)
    table[1, : columns // 2] = table[0, : columns // 2]
    kv = PagedKV(keys=keys, values=values, page_size=page)
    return kv, Pages(host=table, device=torch.from_numpy(table).cuda())


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (got.float() - wanted.float()).norm() / wanted.float().norm()
    assert error < 6e-3
    torch.testing.assert_close(got, wanted, atol=3e-2, rtol=3e-2)


def check_mixed(template: str, geometry: Geometry, page: int, stored: torch.dtype = BF16) -> None:
    """Run mixed batches one after the other, as an engine does, and compare."""
    kv, pages = make_kv(geometry, page, stored)
    backend, reference = FlashInferAttention(geometry, kv, template), ReferenceAttention(geometry, kv)
    rows = DecodeRows(
        slots=np.array([5, 0, 2, 1]), lengths=np.array([1, 1536, 17, 900], np.int32), pages=pages
    )
    chunks = (
        Chunk(slot=3, start=0, count=1),
        Chunk(slot=4, start=0, count=333),
        Chunk(slot=6, start=777, count=150),
        Chunk(slot=7, start=1, count=1),
    )
    for some in (chunks, chunks[1:2], chunks[2:]):
        tokens = len(rows.slots) + sum(chunk.count for chunk in some)
        q = torch.randn(tokens, geometry.heads, geometry.head_dim, device="cuda", dtype=BF16)
        k, v = torch.randn(2, tokens, geometry.kv_heads, geometry.head_dim, device="cuda", dtype=BF16)
        slots = np.concatenate([rows.slots, np.repeat([c.slot for c in some], [c.count for c in some])])
        positions = np.concatenate([rows.lengths - 1, *(np.arange(c.start, c.end) for c in some)])
        cells = pages.host[slots, positions // page].astype(np.int64) * page + positions % page
        where = torch.from_numpy(cells).cuda()
        got = MixedAttention(kv, backend, backend).plan(where, rows, some)
        wanted = MixedAttention(kv, reference, reference).plan(where, rows, some)
        for layer in range(len(geometry.windows)):
            close(got(layer, q, k, v), wanted(layer, q, k, v))


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("windows", [(None,), (None, 100)], ids=["full", "window"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_mixed_batches(
    template: str, head_dim: int, windows: tuple[int | None, ...], groups: int, page: int
) -> None:
    for window in windows:
        need(template, head_dim, window is not None)
    check_mixed(template, Geometry(heads=2 * groups, kv_heads=2, head_dim=head_dim, windows=windows), page)


def test_an_eight_bit_cache() -> None:
    need("fa2", 128, window=False, stored=FP8)
    geometry = Geometry(heads=8, kv_heads=2, head_dim=128, windows=(None,))
    check_mixed("fa2", geometry, 16, FP8)


@pytest.mark.parametrize("windows", [(None,), (None, 60)], ids=["full", "window"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_captured_batches_follow_their_lengths(template: str, windows: tuple[int | None, ...]) -> None:
    for window in windows:
        need(template, 128, window is not None)
    geometry = Geometry(heads=8, kv_heads=2, head_dim=128, windows=windows)
    kv, pages = make_kv(geometry, 16)
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
            which = rng.integers(0, SLOTS, rows)
            counts = rng.integers(1, longest + 1, rows).astype(np.int32)
            used = rows - rows // 4  # the others pad the batch
            counts[used:] = 1
            slots[:rows].copy_(torch.from_numpy(which.astype(np.int32)))
            lengths[:rows].copy_(torch.from_numpy(counts))
            out.fill_(float("nan"))
            backend.refresh(rows, counts[:used])
            graphs[rows].replay()
            plan = reference.plan_decode(DecodeRows(slots=which, lengths=counts, pages=pages))
            for layer in range(len(windows)):
                wanted = torch.empty_like(q[:rows])
                plan(layer, q[:rows], None, None, wanted)
                close(out[layer, :rows], wanted)


def test_what_does_not_run_is_named() -> None:
    odd = Geometry(heads=4, kv_heads=2, head_dim=96, windows=(None,))
    with pytest.raises(ValueError, match=r"head_dim must be one of \(64, 128, 256\), not 96"):
        make_attention(odd, make_kv(odd, 16)[0], prefill="flashinfer", decode="reference")
    geometry = Geometry(heads=4, kv_heads=2, head_dim=64, windows=(None,))
    kv, _ = make_kv(geometry, 16, FP8)
    with pytest.raises(ValueError, match="bfloat16 or float16, not float8_e4m3fn"):
        make_attention(geometry, kv, prefill="reference", decode="flashinfer-fa3")
