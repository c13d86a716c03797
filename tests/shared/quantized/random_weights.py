# SPDX-License-Identifier: Apache-2.0
"""Random quantized weights in canonical form, with codes and scales at the ends of their ranges."""

from __future__ import annotations

from typing import Any

import torch

from mizzen.layers.experts.biases import ExpertBiases
from mizzen.layers.experts.products import SortedProduct
from mizzen.layers.experts.quantized_stack import QuantizedExperts
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


def make_experts(
    experts: int, rows: int, columns: int, device: torch.device, *, codes: Codes, **format: Any
) -> QuantizedExperts:
    """Return experts with random codes, and values of about the root of 1 / columns.

    `format` are further arguments of `make_weight`; codes of E2M1 have a scale for 32 columns.
    """
    if codes is Codes.E2M1:
        generator = torch.Generator().manual_seed(rows)
        shape = (experts * rows, columns // 2)
        values = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        exponents = torch.randint(110, 124, (len(values), columns // 32), generator=generator)
        weight = QuantizedWeight(codes=codes, values=values, scales=exponents.to(torch.uint8), column_step=32)
    else:
        weight = make_weight(codes, experts * rows, columns, **format)
        largest = weight.dequantize().abs().max() * columns**0.5 / 4
        weight.scales = (weight.scales.float() / largest).to(weight.scales.dtype)
    move_weight(weight, device)
    return QuantizedExperts(weight=weight, rows=rows)


def sum_by_loop(
    weights: Any, activation: Any, x: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    """Return the sums of a loop over experts, float64 [tokens, hidden], on the device of x.

    `weights` has `gate_up` and `down`, of `make_experts`, and `biases`.
    """
    gate_up, down = (
        experts.weight.dequantize().to(x.device).double().unflatten(0, (-1, experts.rows))
        for experts in (weights.gate_up, weights.down)
    )
    biases = weights.biases
    if biases is not None and biases.down is not None:
        biases = ExpertBiases(biases.gate_up.to(x.device).double(), biases.down.to(x.device).double())
    return SortedProduct(gate_up, down, activation, biases)(x.double(), chosen, factors.double())


def move_weight(weight: QuantizedWeight, device: torch.device) -> None:
    """Move the tensors of a weight to a device."""
    for name in ("values", "scales", "zeros"):
        value = getattr(weight, name)
        setattr(weight, name, None if value is None else value.to(device))
