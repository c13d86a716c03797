# SPDX-License-Identifier: Apache-2.0
"""Values of the tensors of quantized layers with dummy weights.

Codes are random, and scales are such that the products of a layer with its inputs have the inputs' size.
Zero points are those of symmetric weights.
"""

from __future__ import annotations

import math

import torch

from mizzen.layers.weight_target import DummyFill
from mizzen.quantization.schemes import Fp8Weights, PackedIntegers, Packing, WeightScheme

INPUT_SCALE = 0.05
"""Static scale of inputs, with which FP8 inputs up to 22 do not saturate."""
E4M3_SIZE, INT8_SIZE, INT4_SIZE = 100.1, 73.9, 4.64
"""Root of the mean square of q - z for random codes."""
NAN_MAGNITUDE = 0x7F
"""Code of e4m3's NaN, without the sign."""
STRIDE = 1021
"""Distance of columns of the same group in activation order; a prime number."""


def choose_fill(scheme: WeightScheme, suffix: str, columns: int) -> float | DummyFill:
    """Return the value of all elements of a tensor, or a function that fills it.

    Args:
        scheme: Scheme of the layer.
        suffix: First suffix of the tensor's name.
        columns: Input columns of the whole layer.
    """
    match suffix:
        case "weight" | "qweight" | "weight_packed":
            return fill_e4m3 if isinstance(scheme, Fp8Weights) else fill_integers
        case "input_scale":
            return INPUT_SCALE
        case "qzeros" | "weight_zero_point" if isinstance(scheme, PackedIntegers):
            return implied_zero_word(scheme)
        case "g_idx" | "weight_g_idx" if isinstance(scheme, PackedIntegers):
            return fill_ordered_groups(scheme)
        case _:
            return _round_scale(scheme, 1 / (_code_size(scheme) * math.sqrt(columns)))


def _code_size(scheme: WeightScheme) -> float:
    """Return the root of the mean square of q - z."""
    match scheme:
        case Fp8Weights():
            return E4M3_SIZE
        case PackedIntegers(bits=4):
            return INT4_SIZE
        case _:
            return INT8_SIZE


def _round_scale(scheme: WeightScheme, scale: float) -> float:
    """Round a scale to the type in which exporters store such scales, so that kernels read this type.

    compressed-tensors stores bfloat16, AWQ and GPTQ float16 that bfloat16 cannot represent.
    """
    if not isinstance(scheme, PackedIntegers):
        return scale
    if scheme.packing is Packing.COMPRESSED_TENSORS:
        return float(torch.tensor(scale, dtype=torch.bfloat16))
    return float((torch.tensor(scale, dtype=torch.float16).view(torch.int16) | 1).view(torch.float16))


def implied_zero_word(scheme: PackedIntegers) -> int:
    """Return the word of 32 bits, as a signed integer, that stores the zero points of symmetric weights."""
    zero = 2 ** (scheme.bits - 1) - (scheme.packing is Packing.GPTQ)
    word = sum(zero << place for place in range(0, 32, scheme.bits))
    return word - 2**32 if word >= 2**31 else word


def fill_integers(codes: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a tensor of integers with random bits."""
    codes.view(torch.uint8).random_(0, 256, generator=generator)


def fill_e4m3(codes: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a tensor with random e4m3 codes except NaN."""
    codes = codes.view(torch.uint8)
    codes.random_(0, 2 * NAN_MAGNITUDE, generator=generator)
    codes.add_(codes >= NAN_MAGNITUDE)  # from 127 codes without a sign to those from 0x80 to 0xfe


def fill_ordered_groups(scheme: PackedIntegers) -> DummyFill:
    """Return a function that fills a tensor with the group of each column.

    In activation order, the columns of a group lie apart, and the groups are the same for all layers with the
    same inputs, as in real checkpoints.
    """

    def fill(groups: torch.Tensor, generator: torch.Generator) -> None:
        columns = torch.arange(len(groups), device=groups.device)
        if scheme.activation_order and len(groups) % STRIDE:
            columns = columns * STRIDE % len(groups)
        groups.copy_(columns // (scheme.group_size or len(groups)))

    return fill
