# SPDX-License-Identifier: Apache-2.0
"""Random quantized weights in canonical form, on the GPU."""

from __future__ import annotations

import torch

from mizzen.layers.quantized.canonical import Codes, QuantizedWeight


def make_weight(
    codes: str,
    rows: int,
    columns: int,
    row_step: int = 1,
    column_step: int = 0,
    *,
    zeros: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> QuantizedWeight:
    """Return a weight with random codes, scales (1 : 10 : 0.01) and, with `zeros`, zero points.

    `row_step` rows and `column_step` columns share a scale (0: all columns); `dtype` is that of the scales.
    """
    generator = torch.Generator().manual_seed(seed + rows * columns + row_step)
    kind, column_step = Codes(codes), column_step or columns
    shape = (-(-rows // row_step), -(-columns // column_step))
    width = columns // 2 if kind is Codes.UINT4 else columns
    values = torch.randint(256, (rows, width), generator=generator, dtype=torch.uint8)
    if kind is Codes.E4M3:
        values = torch.where(values & 127 == 127, 0, values).view(torch.float8_e4m3fn)
    elif kind is Codes.INT8:
        values = values.view(torch.int8)
    factors = torch.tensor([1.0, 10.0, 0.01])[torch.randint(3, shape, generator=generator)]
    largest = {Codes.E4M3: 448, Codes.UINT4: 8}.get(kind, 128)
    scales = factors * (0.5 + torch.rand(shape, generator=generator)) / (largest * columns**0.5)
    high = 16 if kind is Codes.UINT4 else 256
    points = torch.randint(high, shape, generator=generator, dtype=torch.uint8).cuda() if zeros else None
    return QuantizedWeight(
        codes=kind,
        values=values.cuda(),
        scales=scales.to(dtype).cuda(),
        row_step=row_step,
        column_step=column_step,
        zeros=points,
    )
