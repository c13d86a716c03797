# SPDX-License-Identifier: Apache-2.0
"""Decode attention with length-aware splits equals the reference, for any lengths.

The plan's test runs in Triton's interpreter too (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_kit import SLOTS, CapturedBatch, make_kv
from triton_device import DEVICE, GPU, RUNS_TRITON

from mizzen.attention.base import DecodeRows, Geometry, PagedKV, PageTable, PlannedAttention
from mizzen.attention.flash_decode import FlashDecodeAttention, FlashDecodeBatch
from mizzen.attention.reference import ReferenceAttention
from mizzen.core.request import Int32
from mizzen.kernels.attention import split_plan
from mizzen.kernels.attention.qk_norm_rope import qk_norm_rope

pytestmark = RUNS_TRITON
ON_HOPPER = pytest.mark.skipif(
    not GPU or torch.cuda.get_device_capability()[0] < 9, reason="needs a Hopper GPU (or a later one)"
)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare results as a whole and row by row, because long contexts have smaller outputs than others."""
    actual, expected = actual.float().flatten(1), expected.float().flatten(1)
    error = (actual - expected).norm(dim=1) / expected.norm(dim=1)
    assert float((actual - expected).norm() / expected.norm()) < 6e-3
    assert (error < 2e-2).all(), error.topk(min(5, len(error)))


def around(mean: int, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(mean // 2, mean * 3 // 2, count).tolist()


MIXES: dict[str, list[int]] = {
    "one of 30,000 beside 100": [30_000, *around(1000, 100)],
    "one of 9,000 beside 7": [9000, *around(500, 7)],
    "long ones last": [*around(200, 60), 17, 5000, 8001],
    "of all lengths": np.random.default_rng(1).integers(1, 6000, 40).tolist(),
    "with rows of padding": [12_000, *around(700, 20), *[1] * 43],
    "as many parts as there can be": [40_000, *[1] * 7],
    "equal": [1500] * 48,
}


PLANNED: dict[str, list[int]] = {
    **MIXES,
    "1,100 rows": [60_000, 30_000, *around(300, 1098)],
    "on both sides of being long": [512, 513, 1024, 1025, *[1] * 92],
}


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("mix", PLANNED)
def test_the_device_plan_equals_the_host_plan(mix: str, kv_heads: int, window: int | None) -> None:
    lengths = np.array(PLANNED[mix], np.int32)
    for resident in (3, 4):
        schedule = split_plan.make_schedule(len(lengths), kv_heads, 132, resident)
        actual = split_plan.plan_splits(torch.from_numpy(lengths).to(DEVICE), window, schedule).cpu().numpy()
        expected = split_plan.plan_reference(lengths, window, schedule)
        used = expected[:, 0] >= 0
        assert np.array_equal(actual[:, 0], expected[:, 0])
        assert np.array_equal(actual[used], expected[used])


class Batch:
    """A decode batch over random KV in scattered pages.

    In the kernel's cache, unlike the reference's, all entries that belong to no row are NaN.
    """

    def __init__(self, lengths: list[int], geometry: Geometry, page: int, stored: torch.dtype) -> None:
        self.lengths = np.array(lengths, np.int32)
        self.geometry = geometry
        rows, rng = len(lengths), np.random.default_rng(3)
        counts = -(-self.lengths // page)
        order = rng.permutation(int(counts.sum()) + 1).astype(np.int32)
        table = np.full((rows, counts.max()), order[-1], np.int32)  # no row owns the last page
        own = np.zeros((len(order), page), np.bool_)
        for row, (count, end) in enumerate(zip(counts, counts.cumsum(), strict=True)):
            table[row, :count] = order[end - count : end]
            tokens = np.arange(self.lengths[row])
            own[table[row, tokens // page], tokens % page] = True
        self.own = torch.from_numpy(own.ravel()).to(DEVICE)
        self.pages = PageTable(host=table, device=torch.from_numpy(table).to(DEVICE))
        shape = (len(geometry.windows), own.size, geometry.kv_heads, geometry.head_dim)
        torch.manual_seed(page)
        kv_values = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
        foreign = ~self.own[:, None, None]
        plain = [x.to(stored, copy=True) for x in kv_values]
        holed = [x.masked_fill(foreign, float("nan")).to(stored) for x in kv_values]
        self.plain = PagedKV(keys=plain[0], values=plain[1], page_size=page)
        self.kv = PagedKV(keys=holed[0], values=holed[1], page_size=page)
        if geometry.has_sinks:
            sinks = torch.randn(len(geometry.windows), geometry.heads, device=DEVICE, dtype=torch.bfloat16)
            self.plain, self.kv = replace(self.plain, sinks=sinks), replace(self.kv, sinks=sinks)
        last = self.lengths - 1
        slot_mapping = table[np.arange(rows), last // page].astype(np.int64) * page + last % page
        self.slot_mapping = torch.from_numpy(slot_mapping).to(DEVICE)
        self.rows = DecodeRows(slots=np.arange(rows), lengths=self.lengths, pages=self.pages)
        self.on_device = (
            torch.arange(rows, dtype=torch.int32, device=DEVICE),
            torch.from_numpy(self.lengths).to(DEVICE),
            self.pages.device,
        )

    def expect(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Return the reference's result for q [rows, heads, d]; in float32 if heads have attention sinks.

        With sinks, the reference rounds scores to the dtype of the queries.
        """
        kv = self.plain
        if kv.sinks is not None:
            kv = replace(kv, keys=kv.keys.float(), values=kv.values.float(), sinks=kv.sinks.float())
            q = q.float()
        expected = torch.empty_like(q)
        ReferenceAttention(self.geometry, kv).plan_decode(self.rows)(layer, q, None, None, expected)
        return expected

    def check(self, norm: bool) -> FlashDecodeAttention:
        """Compare all layers with the reference, with and without fused QKV prep; return the backend."""
        geometry, rows = self.geometry, len(self.lengths)
        heads, kv_heads, size = geometry.heads, geometry.kv_heads, geometry.head_dim
        qkv = torch.randn(rows, (heads + 2 * kv_heads) * size, device=DEVICE, dtype=torch.bfloat16)
        scales = torch.randn(2, size, device=DEVICE, dtype=torch.bfloat16)
        norms = (scales[0], scales[1]) if norm else None
        angles = torch.randn(rows, 1, size // 2, device=DEVICE)
        angles = (angles.cos(), angles.sin())
        backend = FlashDecodeAttention(geometry, self.kv)
        for _ in range(2):
            run = backend.plan_length_splits_on_device(*self.on_device)
            assert isinstance(run, FlashDecodeBatch)
            for layer in range(len(geometry.windows)):
                stored = (self.plain.keys[layer], self.plain.values[layer])
                q = qk_norm_rope(qkv, norms, 1e-6, *angles, self.slot_mapping, *stored)
                expected = self.expect(layer, q)
                for way in ("projected", "ready"):
                    out = torch.full_like(q, float("nan"))
                    if way == "projected":
                        run.fuse_qkv_prep(self.slot_mapping)(layer, qkv, norms, 1e-6, *angles, out)
                    else:
                        run(layer, q, None, None, out)
                    close(out, expected)
        assert not backend.workspace.counters.any()
        for written, plain in ((self.kv.keys, self.plain.keys), (self.kv.values, self.plain.values)):
            actual, expected = written[:, self.own].float(), plain[:, self.own].float()
            assert (actual - expected).norm() < 1e-3 * expected.norm()
        return backend


def geometry_of(heads: int, kv_heads: int, size: int, *windows: int | None) -> Geometry:
    return Geometry(heads=heads, kv_heads=kv_heads, head_dim=size, windows=windows or (None, None))


def by_lengths(run: PlannedAttention) -> bool:
    return isinstance(run, FlashDecodeBatch) and run.plans is not None


@ON_HOPPER
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_length_aware_splits_equal_the_reference(mix: str, stored: torch.dtype) -> None:
    batch = Batch(MIXES[mix], geometry_of(8, 2, 128), 16, stored)
    backend = batch.check(norm=True)
    if "beside" in mix:
        assert backend.length_splits_are_faster(len(batch.lengths), batch.lengths)
        assert by_lengths(backend.plan_decode(batch.rows))
    if mix == "equal":
        assert not by_lengths(backend.plan_decode(batch.rows))


@ON_HOPPER
@pytest.mark.parametrize(
    ("shape", "page", "windows"),
    [
        ((8, 1, 128), 16, (None, 4000)),
        ((4, 4, 128), 1, (None, None)),
        ((6, 2, 64), 16, (700, None)),
        ((8, 8, 64), 1, (4000, 60)),
        ((5, 1, 128), 24, (None, 1000)),
        ((32, 8, 128), 64, (None, None)),
    ],
    ids=str,
)
@pytest.mark.parametrize("mix", ["one of 9,000 beside 7", "long ones last", "with rows of padding"])
def test_length_aware_splits_work_for_other_shapes(
    mix: str, shape: tuple[int, int, int], page: int, windows: tuple[int | None, ...]
) -> None:
    Batch(MIXES[mix], geometry_of(*shape, *windows), page, torch.bfloat16).check(norm=shape[2] == 128)


@ON_HOPPER
@pytest.mark.parametrize("shape", [(16, 2, 64), (8, 2, 128)], ids=str)
@pytest.mark.parametrize("mix", ["one of 9,000 beside 7", "long ones last", "with rows of padding"])
def test_length_aware_splits_count_attention_sinks_once(mix: str, shape: tuple[int, int, int]) -> None:
    geometry = replace(geometry_of(*shape, None, 700), has_sinks=True)
    Batch(MIXES[mix], geometry, 16, torch.bfloat16).check(norm=False)


@ON_HOPPER
def test_every_replay_plans_its_splits_again() -> None:
    geometry = geometry_of(8, 2, 128, None, 60)
    kv, pages = make_kv(geometry, 16, torch.bfloat16)
    backend = FlashDecodeAttention(geometry, kv)
    rows, rng = 64, np.random.default_rng(0)
    batch = CapturedBatch(backend, backend.plan_length_splits_on_device, pages, rows)

    def drawn(most: int, *long: int) -> Int32:
        return np.array([*long, *rng.integers(1, most + 1, rows - len(long))], np.int32)

    for counts in (drawn(1), drawn(40, 1536), drawn(20, 1536, 900), drawn(1536), drawn(30)[::-1].copy()):
        batch.check(rng.integers(0, SLOTS, rows), counts, close)
    assert not backend.workspace.counters.any()
