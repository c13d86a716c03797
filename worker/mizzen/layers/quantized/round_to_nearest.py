# SPDX-License-Identifier: Apache-2.0
"""Quantizes unquantized weights by rounding to the nearest code, for `--quantization`.

Scales follow from the largest absolute value of a row or group alone, so that no data is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mizzen.layers.quantized.canonical import IMPLIED_ZEROS, Codes, QuantizedWeight
from mizzen.models.hf_fields import ConfigError
from mizzen.quantization.schemes import Fp8Weights, Int8Weights, PackedIntegers, WeightScheme

LARGEST = {Codes.E4M3: 448.0, Codes.INT8: 127.0, Codes.UINT4: 7.5}
"""Quotient of the largest absolute value and the scale. The codes of `UINT4` minus their zero point range
from -8 to 7; with 7.5, the scale is half a step too small for the largest value of either sign, as in
compressed-tensors."""
BLOCK_ELEMENTS = 1 << 22
"""Elements that are rounded together, so that temporary tensors in float32 stay small."""


def round_weight(weight: torch.Tensor, scheme: WeightScheme) -> QuantizedWeight:
    """Quantize a weight of a linear layer; the result is on the same device.

    A row or group of zeros gets the scale 1.

    Args:
        weight: Floating-point weight [rows, columns].
        scheme: One of `mizzen.quantization.online.ONLINE_SCHEMES`, which `check_columns` accepts.

    Raises:
        ValueError: The scheme needs data or stored codes.
    """
    rows, columns = weight.shape
    match scheme:
        case Fp8Weights():
            codes, step, scale_dtype, value_dtype = Codes.E4M3, columns, torch.float32, torch.float8_e4m3fn
        case Int8Weights():
            codes, step, scale_dtype, value_dtype = Codes.INT8, columns, torch.float32, torch.int8
        case PackedIntegers(bits=4, group_size=int(size)):
            codes, step, scale_dtype, value_dtype = (
                Codes.UINT4,
                min(size, columns),
                torch.bfloat16,
                torch.uint8,
            )
        case _:
            raise ValueError(f"weights cannot be quantized to {scheme} while they are loaded")
    packed = 2 if codes is Codes.UINT4 else 1
    values = torch.empty(rows, columns // packed, dtype=value_dtype, device=weight.device)
    scales = torch.empty(rows, -(-columns // step), dtype=scale_dtype, device=weight.device)
    for part in split_rows(rows, columns):
        block = weight[part].float()
        scales[part] = choose_scales(block, step, LARGEST[codes]).to(scale_dtype)
        factors = scales[part].float().repeat_interleave(step, dim=1)[:, :columns]
        values[part] = round_to_codes(block / factors, codes)
    activations = None if isinstance(scheme, PackedIntegers) else scheme.activations
    return QuantizedWeight(
        codes=codes, values=values, scales=scales, column_step=step, activations=activations
    )


def check_columns(name: str, columns: int, scheme: WeightScheme) -> None:
    """Check that the codes of a row fill whole bytes; `name` is that of the layer.

    Raises:
        ConfigError: They do not.
    """
    if isinstance(scheme, PackedIntegers) and columns % 2:
        raise ConfigError(
            f"--quantization w4a16 needs an even number of input columns, but a rank holds {columns} of "
            f"{name}: use fp8 or int8"
        )


def split_rows(rows: int, columns: int) -> Iterator[slice]:
    """Yield consecutive ranges of rows with at most `BLOCK_ELEMENTS` elements, but at least one row."""
    step = max(1, BLOCK_ELEMENTS // columns)
    for first in range(0, rows, step):
        yield slice(first, min(rows, first + step))


def choose_scales(block: torch.Tensor, step: int, largest: float) -> torch.Tensor:
    """Return the scales (float32 [rows, groups]) of rows (float32 [rows, columns]) in groups of columns."""
    sizes = block.abs()
    peaks = torch.stack([group.amax(dim=1) for group in sizes.split(step, dim=1)], dim=1)
    # PyTorch multiplies by a reciprocal on GPUs if the divisor is a Python number, which rounds twice.
    scales = (peaks / torch.full_like(peaks, largest)).clamp_(min=torch.finfo(torch.float32).tiny)
    return torch.where(peaks > 0, scales, 1.0)


def round_to_codes(quotients: torch.Tensor, codes: Codes) -> torch.Tensor:
    """Round quotients of weights and scales (float32 [rows, columns]) to stored values; ties to even."""
    if codes is Codes.E4M3:
        return quotients.clamp_(-LARGEST[codes], LARGEST[codes]).to(torch.float8_e4m3fn)
    if codes is Codes.INT8:
        return quotients.round_().clamp_(-LARGEST[codes], LARGEST[codes]).to(torch.int8)
    zero = IMPLIED_ZEROS[codes]
    steps = quotients.round_().add_(zero).clamp_(0, 2 * zero - 1).to(torch.uint8)
    return steps[:, 0::2] | steps[:, 1::2] << 4
