# SPDX-License-Identifier: Apache-2.0
"""Selection, for each shape, of the kernel and tile config that were the fastest in measurements."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from mizzen.layers.linear_methods import small_batch
from mizzen.layers.linear_methods.base import LinearKind, LinearSpec
from mizzen.layers.linear_methods.small_batch import SmallBatchLinear, max_small_batch

pytest.importorskip("triton", reason="this PyTorch comes without Triton")

from mizzen.kernels import launch
from mizzen.kernels.attention import flash_decode_mma
from mizzen.kernels.gemm import gate_up_swiglu, gemv, small_m, swap_ab, tile_configs


@pytest.mark.parametrize("count", [1, 2, 40])
def test_biases_are_added_by_the_small_batch_kernels(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(kind: LinearKind, bias: bool = True) -> SmallBatchLinear:
        device = torch.device("meta")
        return SmallBatchLinear(
            LinearSpec(
                parts=(),
                rows=5120,
                columns=2880,
                bias=bias,
                kind=kind,
                dtype=torch.bfloat16,
                device=device,
            )
        )

    biases: list[torch.Tensor | None] = []
    for module, name in ((gemv, "gemv"), (small_m, "small_m_gemm"), (swap_ab, "swap_ab_gemm")):
        monkeypatch.setattr(module, name, lambda *args, bias, **options: biases.append(bias))
    monkeypatch.setattr(small_batch, "max_small_batch", lambda weight, swiglu=False: 64)
    x = torch.empty(count, 2880, dtype=torch.bfloat16, device="meta")
    column, row = layer(LinearKind.COLUMN), layer(LinearKind.ROW)
    plain, head = layer(LinearKind.COLUMN, bias=False), layer(LinearKind.HEAD)
    assert [method.max_batch for method in (column, row, plain, head)] == [48, 64, 48, 0]
    assert [method.max_swiglu_batch for method in (column, plain)] == [0, 64]
    for method in (column, row, plain):
        method.apply(x)
    assert all(
        actual is expected for actual, expected in zip(biases, (column.bias, row.bias, None), strict=True)
    )


def test_long_rows_use_swap_ab_only_where_measured() -> None:
    def max_batch(rows: int, columns: int) -> int:
        return swap_ab.max_batch(torch.empty(rows, columns, device="meta"))

    assert max_batch(5120, 25600) == 64
    assert max_batch(5120, 17408) == max_batch(8192, 28672) == 0
    assert max_batch(4096, 12288) > 64


@pytest.mark.parametrize(
    ("rows", "count", "expected"),
    [
        (24576, 512, False),  # not measured
        (24576, 1024, True),  # 384 items of 66 at once: 6 waves, the last nearly full
        (24576, 1280, False),  # 480: 8 waves, the last with 18
        (24576, 8392, True),
        (6144, 1024, False),  # 96: 2 waves
        (6144, 2048, True),
        (25600, 1024, False),  # 400: 7 waves, the last with 4
        (25600, 8192, True),
    ],
)
def test_gate_up_swiglu_is_used_where_clusters_are_nearly_full(rows: int, count: int, expected: bool) -> None:
    assert gate_up_swiglu.is_faster(rows, count, 66) is expected


@pytest.mark.parametrize(
    ("pairs", "splits_and_warps", "splits_and_warps_8_bit"),
    [
        (1, (64, 8), (64, 8)),
        (16, (8, 8), (8, 8)),
        (64, (2, 8), (2, 8)),
        (128, (1, 8), (1, 8)),
        (160, (2, 4), (3, 4)),
        (192, (2, 4), (2, 4)),
        (256, (1, 4), (2, 4)),
        (264, (1, 4), (2, 4)),
        (384, (1, 4), (1, 4)),
        (512, (1, 8), (1, 4)),
        (640, (1, 4), (1, 4)),
        (4096, (1, 4), (1, 4)),
    ],
)
def test_attention_is_split_as_measured_on_132_sms(
    pairs: int, splits_and_warps: tuple[int, int], splits_and_warps_8_bit: tuple[int, int]
) -> None:
    blocks_per_sm = flash_decode_mma.BLOCKS_PER_SM
    select_splits = flash_decode_mma.select_splits
    assert select_splits(pairs, 132, blocks_per_sm[128, torch.bfloat16]) == splits_and_warps
    assert select_splits(pairs, 132, blocks_per_sm[128, torch.float8_e4m3fn]) == splits_and_warps_8_bit


@pytest.mark.parametrize(
    ("warps", "window", "size", "group", "expected"),
    [
        (8, 128, 64, 8, 12),
        (8, 128, 128, 4, 12),
        (8, 191, 64, 8, 12),
        (8, 192, 64, 8, 8),  # 13 tiles
        (8, None, 64, 8, 8),
        (4, 128, 64, 8, 4),  # a larger batch
        (8, 128, 128, 8, 8),  # too much shared memory
    ],
)
def test_short_windows_get_a_warp_for_each_tile(
    warps: int, window: int | None, size: int, group: int, expected: int
) -> None:
    assert flash_decode_mma.select_warps(warps, window, size, group) == expected


def test_common_shapes_have_tile_configs_that_fit_in_one_wave() -> None:
    for rows, columns in (
        (4096, 1024),
        (24576, 4096),
        (4096, 12288),
        (2560, 5120),
        (2048, 8192),
        (16384, 2048),
    ):
        for batch in range(1, 257):
            config = swap_ab.select_tile_config(rows, columns, batch)
            assert config is not None and -(-rows // config.rows) * config.split_k <= swap_ab.SM_COUNT
    assert swap_ab.select_tile_config(4096, 100, 8) is None
    assert swap_ab.select_tile_config(4096, 1024, 257) is None


def test_unmeasured_batches_use_the_next_measured_or_supported_batch_size() -> None:
    measured = swap_ab.TileConfig(*tile_configs.TILE_CONFIGS[4096, 4096][192])
    assert swap_ab.pad_batch(4096, 4096, 140) == (144, measured)
    assert swap_ab.pad_batch(24576, 4096, 145) == (160, swap_ab.TileConfig(192, 1, 1))
    assert swap_ab.pad_batch(4096, 1024, 70) == (80, swap_ab.TileConfig(64, 1, 2))
    four = swap_ab.TileConfig(64, 1, 4)  # each block loads a fourth of x, in groups of eight rows
    assert swap_ab.pad_batch(4096, 1024, 65, four) == (96, four)
    assert swap_ab.pad_batch(4096, 1024, 250, swap_ab.TileConfig(192, 1, 3)) is None


def test_every_measured_tile_config_supports_its_shape() -> None:
    for (rows, columns), configs in tile_configs.TILE_CONFIGS.items():
        for batch, numbers in configs.items():
            supported = swap_ab.TileConfig(*numbers).supports(rows, columns, batch)
            assert batch in swap_ab.BATCH_SIZES and supported, (rows, columns, batch)
    for (rows, columns), max_batch in tile_configs.MAX_BATCHES.items():
        assert max_batch in (0, *swap_ab.BATCH_SIZES)
        batches = [batch for batch in swap_ab.BATCH_SIZES if batch <= max_batch]
        assert all(swap_ab.select_tile_config(rows, columns, batch) for batch in batches)


@pytest.mark.parametrize(("capability", "max_batch"), [((9, 0), 192), ((10, 0), 4), ((12, 0), 4)])
def test_only_hopper_uses_swap_ab_gemms(
    capability: tuple[int, int], max_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Weight:
        shape, device = (4096, 12288), torch.device("cuda")
        numel = staticmethod(lambda: 4096 * 12288)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(gemv, "supports", lambda weight, swiglu: True)
    launch.has_wgmma.cache_clear()
    assert max_small_batch(cast(torch.Tensor, Weight())) == max_batch
    launch.has_wgmma.cache_clear()
