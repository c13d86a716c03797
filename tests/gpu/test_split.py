"""Split decode attention equals plain attention, on a GPU or in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from mizzen.attention.base import DecodeRows, Geometry, PagedKV, Pages
from mizzen.attention.reference import ReferenceAttention
from mizzen.kernels.heads import prepare_heads
from mizzen.kernels.split import Cache, Projections, Tiling, Workspace, attend

GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32
LONGEST = 400
SLOTS = 6
TILINGS = [
    Tiling(splits=1, block=32, warps=4, stages=0),
    Tiling(splits=4, block=32, warps=4, stages=0),
    Tiling(splits=16, block=64, warps=4, stages=0),
    Tiling(splits=1, block=64, warps=4, stages=3),
    Tiling(splits=2, block=32, warps=2, stages=2),
]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, DTYPE)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (got.float() - wanted.float()).norm() / wanted.float().norm()
    assert error < (6e-3 if GPU else 1e-5)


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda t: f"{t.splits}x{t.block}s{t.stages}")
@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page", "norm"),
    [(4, 2, 128, 16, True), (8, 2, 64, 1, False), (3, 1, 32, 24, True), (2, 2, 256, 16, False)],
)
def test_split_attention(
    heads: int, kv_heads: int, size: int, page: int, norm: bool, window: int | None, tiling: Tiling
) -> None:
    columns = -(-LONGEST // page)
    table = np.random.default_rng(3).permutation(SLOTS * columns).astype(np.int32).reshape(SLOTS, columns)
    pages = Pages(host=table, device=torch.from_numpy(table).to(DEVICE))
    room = SLOTS * columns * page
    keys, values = normal(1, room, kv_heads, size, seed=1), normal(1, room, kv_heads, size, seed=2)
    plain = PagedKV(keys=keys.clone(), values=values.clone(), page_size=page)
    rows = DecodeRows(
        slots=np.array([5, 0, 2, 3]), lengths=np.array([1, LONGEST, 17, 129], np.int32), pages=pages
    )
    at = rows.lengths - 1
    where = table[rows.slots, at // page].astype(np.int64) * page + at % page
    cells = torch.from_numpy(where).to(DEVICE)
    qkv = normal(4, (heads + 2 * kv_heads) * size, seed=3)
    weights = (normal(size, seed=4), normal(size, seed=5)) if norm else None
    angles = torch.randn(4, 1, size // 2, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    cos, sin = angles.cos(), angles.sin()

    q = prepare_heads(qkv, weights, 1e-6, cos, sin, cells, plain.keys[0], plain.values[0])
    geometry = Geometry(heads=heads, kv_heads=kv_heads, head_dim=size, windows=(window,))
    wanted = torch.empty_like(q)
    ReferenceAttention(geometry, plain).plan_decode(rows)(0, q, None, None, wanted)

    cache = Cache(
        keys=keys[0],
        values=values[0],
        slots=torch.from_numpy(rows.slots.astype(np.int32)).to(DEVICE),
        lengths=torch.from_numpy(rows.lengths).to(DEVICE),
        table=pages.device,
        page_size=page,
    )
    workspace = Workspace.allocate(
        4 * kv_heads * tiling.splits, 4 * kv_heads, heads // kv_heads, size, DEVICE
    )
    projections = Projections(norms=weights, epsilon=1e-6, cos=cos, sin=sin, cells=cells)
    for given, how in ((qkv, projections), (q, None)):
        for _ in range(2):
            out = torch.full_like(q, float("nan"))
            attend(given, how, cache, out, window, tiling, workspace)
            close(out, wanted)
    assert not workspace.counters.any()
    close(keys, plain.keys)
    assert torch.equal(values, plain.values)
