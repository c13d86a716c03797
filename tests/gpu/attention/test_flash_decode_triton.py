# SPDX-License-Identifier: Apache-2.0
"""Split-KV decode attention equals the reference, on a GPU or in Triton's interpreter
(TRITON_INTERPRET=1)."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from triton_device import DEVICE, DTYPE, GPU, RUNS_TRITON

from mizzen.attention.base import DecodeRows, Geometry, PagedKV, PageTable
from mizzen.attention.reference import ReferenceAttention
from mizzen.kernels.attention import flash_decode_mma, flash_decode_triton
from mizzen.kernels.attention.flash_decode_triton import DecodeTiling, LayerKV, QKVPrep, SplitWorkspace
from mizzen.kernels.attention.qk_norm_rope import qk_norm_rope

pytestmark = RUNS_TRITON
LONGEST = 400
SLOTS = 6
TILINGS = [
    DecodeTiling(splits=1, block=32, warps=4, stages=0),
    DecodeTiling(splits=4, block=32, warps=4, stages=0),
    DecodeTiling(splits=16, block=64, warps=4, stages=0),
    DecodeTiling(splits=1, block=64, warps=4, stages=3),
    DecodeTiling(splits=2, block=32, warps=2, stages=2),
    DecodeTiling(splits=16, block=64, warps=8, stages=0),
    DecodeTiling(splits=2, block=64, warps=8, stages=2),
]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, DTYPE)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < (6e-3 if GPU else 1e-5)


SHAPES = [(4, 2, 128, 16, True), (8, 2, 64, 1, False), (3, 1, 32, 24, True), (2, 2, 256, 16, False)]
"""Number of heads and of KV heads, head dimension, page size, and whether queries and keys are normalized."""


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda t: f"{t.splits}x{t.block}s{t.stages}w{t.warps}")
@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_decode_equals_the_reference(
    shape: tuple[int, int, int, int, bool], window: int | None, tiling: DecodeTiling
) -> None:
    check(flash_decode_triton, shape, window, tiling, DTYPE)


@pytest.mark.parametrize(
    "tiling", [*TILINGS[:2], TILINGS[4]], ids=lambda t: f"{t.splits}x{t.block}s{t.stages}"
)
@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_triton_decode_with_sinks_equals_the_reference(
    shape: tuple[int, int, int, int, bool], window: int | None, tiling: DecodeTiling
) -> None:
    check(flash_decode_triton, shape, window, tiling, DTYPE, has_sinks=True)


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("tiling", TILINGS[1:3], ids=lambda t: f"{t.splits}x{t.block}s{t.stages}")
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_triton_decode_equals_the_reference_in_8_bits(
    shape: tuple[int, int, int, int, bool], tiling: DecodeTiling
) -> None:
    check(flash_decode_triton, shape, None, tiling, torch.float8_e4m3fn)


@pytest.mark.skipif(
    not GPU or torch.cuda.get_device_capability()[0] < 9, reason="needs a Hopper GPU (or a later one)"
)
@pytest.mark.parametrize(("splits", "warps"), [(1, 4), (4, 4), (16, 8), (2, 1)])
@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (4, 2, 128, 16, True),
        (8, 1, 128, 1, True),
        (6, 2, 128, 24, False),
        (3, 3, 128, 64, False),
        (4, 2, 64, 16, True),
        (16, 2, 64, 8, False),
    ],
    ids=str,
)
def test_mma_decode_equals_the_reference(
    shape: tuple[int, int, int, int, bool], dtype: torch.dtype, window: int | None, splits: int, warps: int
) -> None:
    heads, kv_heads, size, _, _ = shape
    if not flash_decode_mma.supports(
        torch.empty(1, kv_heads, size, dtype=dtype, device=DEVICE), heads // kv_heads
    ):
        pytest.skip("the kernel does not support this shape")
    check(
        flash_decode_mma, shape, window, DecodeTiling(splits=splits, block=16, warps=warps, stages=0), dtype
    )


@pytest.mark.skipif(
    not GPU or torch.cuda.get_device_capability()[0] < 9, reason="needs a Hopper GPU (or a later one)"
)
@pytest.mark.parametrize(("splits", "warps"), [(1, 4), (4, 4), (16, 8), (1, 8)])
@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((16, 2, 64, 16, False), torch.bfloat16),
        ((6, 2, 128, 24, True), torch.bfloat16),
        ((8, 1, 128, 16, False), torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_mma_decode_with_sinks_equals_the_reference(
    shape: tuple[int, int, int, int, bool], dtype: torch.dtype, window: int | None, splits: int, warps: int
) -> None:
    tiling = DecodeTiling(splits=splits, block=16, warps=warps, stages=0)
    check(flash_decode_mma, shape, window, tiling, dtype, has_sinks=True)


@pytest.mark.skipif(
    not GPU or torch.cuda.get_device_capability()[0] < 9, reason="needs a Hopper GPU (or a later one)"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_workspace_holds_the_splits_of_every_batch(dtype: torch.dtype) -> None:
    for kv_heads in (1, 2, 8, 40):
        cache = torch.empty(1, kv_heads, 128, dtype=dtype, device=DEVICE)
        for rows in range(1, 513):
            splits = flash_decode_mma.select_tiling(rows, cache).splits
            assert 1 <= splits <= flash_decode_mma.MAX_SPLITS
            assert splits == 1 or rows * kv_heads * splits <= flash_decode_mma.MAX_PROGRAMS


def check(
    kernel: ModuleType,
    shape: tuple[int, int, int, int, bool],
    window: int | None,
    tiling: DecodeTiling,
    dtype: torch.dtype,
    *,
    has_sinks: bool = False,
) -> None:
    """Compare a kernel with plain attention, with and without fused QKV preparation.

    All cache entries that do not belong to the rows are NaN. The sinks include one that takes almost all of
    the softmax, and one that takes nothing.
    """
    heads, kv_heads, size, page, norm = shape
    columns = -(-LONGEST // page)
    table = np.random.default_rng(3).permutation(SLOTS * columns).astype(np.int32).reshape(SLOTS, columns)
    pages = PageTable(host=table, device=torch.from_numpy(table).to(DEVICE))
    kv_rows = SLOTS * columns * page
    rows = DecodeRows(
        slots=np.array([5, 0, 2, 3]), lengths=np.array([1, LONGEST, 17, 129], np.int32), pages=pages
    )
    own = torch.zeros(kv_rows, dtype=torch.bool, device=DEVICE)
    for slot, length in zip(rows.slots, rows.lengths, strict=True):
        tokens = np.arange(length)
        own[torch.from_numpy(table[slot, tokens // page].astype(np.int64) * page + tokens % page)] = True
    kv_values = [normal(1, kv_rows, kv_heads, size, seed=seed) for seed in (1, 2)]
    plain = PagedKV(
        keys=kv_values[0].to(dtype, copy=True), values=kv_values[1].to(dtype, copy=True), page_size=page
    )
    keys, values = (
        kv_value.masked_fill(~own[:, None, None], float("nan")).to(dtype) for kv_value in kv_values
    )
    at = rows.lengths - 1
    rows_in_cache = table[rows.slots, at // page].astype(np.int64) * page + at % page
    slot_mapping = torch.from_numpy(rows_in_cache).to(DEVICE)
    qkv = normal(4, (heads + 2 * kv_heads) * size, seed=3)
    weights = (normal(size, seed=4), normal(size, seed=5)) if norm else None
    angles = torch.randn(4, 1, size // 2, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    cos, sin = angles.cos(), angles.sin()

    q = qk_norm_rope(qkv, weights, 1e-6, cos, sin, slot_mapping, plain.keys[0], plain.values[0])
    geometry = Geometry(heads=heads, kv_heads=kv_heads, head_dim=size, windows=(window,))
    expected, sinks = torch.empty_like(q), None
    if has_sinks:  # the reference rounds scores with sinks to the dtype of the queries
        sinks = normal(heads, seed=7) * 3
        sinks[0], sinks[1] = -torch.inf, 20
        expected = expected.float()
        exact = PagedKV(
            keys=plain.keys.float(), values=plain.values.float(), page_size=page, sinks=sinks[None].float()
        )
        ReferenceAttention(geometry, exact).plan_decode(rows)(0, q.float(), None, None, expected)
    else:
        ReferenceAttention(geometry, plain).plan_decode(rows)(0, q, None, None, expected)

    cache = LayerKV(
        keys=keys[0],
        values=values[0],
        slots=torch.from_numpy(rows.slots.astype(np.int32)).to(DEVICE),
        lengths=torch.from_numpy(rows.lengths).to(DEVICE),
        table=pages.device,
        page_size=page,
        sinks=None if sinks is None else sinks.float() * flash_decode_triton.LOG2E,
    )
    workspace = SplitWorkspace.allocate(
        4 * kv_heads * tiling.splits, 4 * kv_heads, heads // kv_heads, size, DEVICE
    )
    qkv_prep = QKVPrep(norms=weights, epsilon=1e-6, cos=cos, sin=sin, slot_mapping=slot_mapping)
    for projected, prep in ((qkv, qkv_prep), (q, None)):
        for _ in range(2):
            out = torch.full_like(q, float("nan"))
            kernel.attend(projected, prep, cache, out, window, tiling, workspace)
            close(out, expected)
    assert not workspace.counters.any()
    stored, expected_keys = keys[:, own].float(), plain.keys[:, own].float()
    assert (stored - expected_keys).norm() < 1e-3 * expected_keys.norm()
    assert torch.equal(values[:, own].view(torch.uint8), plain.values[:, own].view(torch.uint8))
