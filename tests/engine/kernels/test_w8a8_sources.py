# SPDX-License-Identifier: Apache-2.0
"""The kernels of quantized products compile for Hopper GPUs, with a tiling for every batch size."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="this PyTorch comes without CUDA's bindings")

from mizzen.kernels import nvrtc
from mizzen.kernels.gemm import fragments, w8a8_swap_ab
from mizzen.kernels.gemm.w8a8_swap_ab import W8A8Tile, W8A8Weight
from mizzen.kernels.quantization import dequantize_packed
from mizzen.layers.quantized.canonical import Codes, QuantizedWeight

HOPPER = (9, 0)
SHAPES = ((24576, 4096), (4096, 12288), (6144, 4096), (1024, 1040), (96, 64), (57344, 8192), (3072, 4096))


@pytest.mark.parametrize(
    ("tile", "batch", "int8", "grouped", "swiglu"),
    [
        ((1, 1, 1, 3), 8, False, False, True),
        ((2, 4, 2, 1), 192, False, True, False),
        ((3, 1, 1, 1), 128, False, False, True),
        ((1, 2, 1, 1), 256, True, False, False),
    ],
)
def test_w8a8_kernels_compile(
    tile: tuple[int, int, int, int], batch: int, int8: bool, grouped: bool, swiglu: bool
) -> None:
    spec = w8a8_swap_ab.kernel_spec(
        4096, batch, W8A8Tile(*tile), int8=int8, grouped=grouped, swiglu=swiglu, defer_pdl=not swiglu
    )
    assert len(nvrtc.compile_cubin(*spec, HOPPER)) > 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("grouped", [False, True])
def test_every_batch_size_has_a_tiling_that_fits(shape: tuple[int, int], grouped: bool) -> None:
    for count in range(1, w8a8_swap_ab.MAX_BATCH + 1):
        found = w8a8_swap_ab.pad_batch(*shape, count, grouped, None)
        assert found is not None
        batch, tile = found
        assert count <= batch <= max(8, count + 31)
        assert tile.supports(shape[1], batch, grouped)


def test_specs_are_those_of_the_padded_batch_sizes() -> None:
    weight = W8A8Weight(values=torch.empty(64, 256, dtype=torch.int8), scales=torch.empty(64, 1))
    specs = w8a8_swap_ab.kernel_specs(weight, (1, 3, 8, 100, 5000))
    assert {dict(defines)["BATCH"] for _, _, defines in specs} == {8, 112}


@pytest.mark.parametrize("codes", [Codes.UINT4, Codes.INT8, Codes.E4M3])
def test_kernels_that_restore_weights_compile(codes: Codes) -> None:
    width = 64 if codes is Codes.UINT4 else 128
    dtype = {Codes.INT8: torch.int8, Codes.E4M3: torch.float8_e4m3fn}.get(codes, torch.uint8)
    weight = QuantizedWeight(
        codes=codes,
        values=torch.zeros(64, width, dtype=torch.uint8).view(dtype),
        scales=torch.ones(64, 2, dtype=torch.bfloat16),
        column_step=64,
    )
    packed = fragments.pack_weight(weight, swiglu=True)
    assert dequantize_packed.supports(packed)
    assert len(nvrtc.compile_cubin(*dequantize_packed.kernel_spec(packed), HOPPER)) > 0
