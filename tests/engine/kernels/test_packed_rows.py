# SPDX-License-Identifier: Apache-2.0
"""Rows of weights in the fragment layout are scaled like those of the unpacked weight."""

from __future__ import annotations

import pytest
import torch

from mizzen.kernels.gemm.fragments import ScaleLayout, pack_weight, unpack_weight
from mizzen.kernels.gemm.packed_rows import scale_packed_rows
from mizzen.layers.quantized.canonical import Codes, QuantizedWeight

ROWS, COLUMNS = 160, 256


def make_weight(codes: Codes, row_step: int, column_step: int, dtype: torch.dtype) -> QuantizedWeight:
    """Return a weight with random codes and scales."""
    generator = torch.Generator().manual_seed(row_step)
    width = COLUMNS // 2 if codes is Codes.UINT4 else COLUMNS
    values = torch.randint(120, (ROWS, width), generator=generator, dtype=torch.uint8)
    scales = 0.5 + torch.rand(-(-ROWS // row_step), COLUMNS // column_step, generator=generator)
    return QuantizedWeight(
        codes=codes,
        values=values.view(torch.float8_e4m3fn) if codes is Codes.E4M3 else values,
        scales=scales.to(dtype),
        row_step=row_step,
        column_step=column_step,
    )


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("rows", [slice(32, 64), slice(64, None), slice(3, 37)], ids=str)
@pytest.mark.parametrize(
    ("codes", "row_step", "column_step", "dtype"),
    [
        (Codes.UINT4, 1, 64, torch.bfloat16),
        (Codes.UINT8, 1, COLUMNS, torch.float32),
        (Codes.E4M3, 32, 128, torch.float32),
    ],
)
@pytest.mark.parametrize("factor", [0.25, 2.0**-100])
def test_scaled_rows_equal_the_scaled_weight(
    codes: Codes,
    row_step: int,
    column_step: int,
    dtype: torch.dtype,
    rows: slice,
    swiglu: bool,
    factor: float,
) -> None:
    packed = pack_weight(make_weight(codes, row_step, column_step, dtype), swiglu=swiglu)
    before = unpack_weight(packed)
    expected = before.clone()
    expected[rows] *= factor
    scaled = scale_packed_rows(packed, rows, factor)
    assert torch.equal(unpack_weight(scaled), expected)
    assert torch.equal(unpack_weight(packed), before)


def test_narrow_scales_become_float32_only_if_they_must() -> None:
    weight = make_weight(Codes.UINT4, 1, 64, torch.float16)
    packed = pack_weight(weight)
    assert packed.scale_layout is ScaleLayout.GROUP
    assert scale_packed_rows(packed, slice(0, 8), 0.5).scales.dtype == torch.float16
    assert scale_packed_rows(packed, slice(0, 8), 2.0**-24).scales.dtype == torch.float32
