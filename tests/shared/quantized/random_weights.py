# SPDX-License-Identifier: Apache-2.0
"""Random quantized weights in canonical form, with codes and scales at the ends of their ranges."""

from __future__ import annotations

import torch

from mizzen.layers.quantized.canonical import Codes, QuantizedWeight

SCALES = (1.0, 10.0, 0.01, 0.0, 1e-30)
"""Factors of scales: parts of a merged layer differ as much, and unused parts have about 0."""


def make_weight(
    codes: Codes,
    rows: int,
    columns: int,
    row_step: int = 1,
    column_step: int = 0,
    *,
    zeros: bool = False,
    dtype: torch.dtype = torch.float32,
) -> QuantizedWeight:
    """Return a weight with random codes, scales and, with `zeros`, zero points.

    A `column_step` of 0 means all columns. The first rows hold the smallest and the largest code only.
    """
    generator = torch.Generator().manual_seed(rows * columns + row_step)
    column_step = column_step or columns
    shape = (-(-rows // row_step), -(-columns // column_step))
    width = columns // 2 if codes is Codes.UINT4 else columns
    values = torch.randint(256, (rows, width), generator=generator, dtype=torch.uint8)
    smallest, largest = {Codes.E4M3: (0xFE, 0x7E), Codes.INT8: (0x80, 0x7F)}.get(codes, (0, 0xFF))
    values[0], values[1] = smallest, largest
    if codes is Codes.E4M3:
        values = torch.where(values & 127 == 127, 0, values).view(torch.float8_e4m3fn)
    elif codes is Codes.INT8:
        values = values.view(torch.int8)
    factors = torch.tensor(SCALES)[torch.randint(len(SCALES), shape, generator=generator)]
    scales = (factors * (0.5 + torch.rand(shape, generator=generator))).to(dtype)
    high = 17 if codes is Codes.UINT4 else 256
    z = torch.randint(high, shape, generator=generator, dtype=torch.uint8) if zeros else None
    return QuantizedWeight(
        codes=codes, values=values, scales=scales, row_step=row_step, column_step=column_step, zeros=z
    )


def move_weight(weight: QuantizedWeight, device: torch.device) -> None:
    """Move the tensors of a weight to a device."""
    for name in ("values", "scales", "zeros"):
        value = getattr(weight, name)
        setattr(weight, name, None if value is None else value.to(device))
