# SPDX-License-Identifier: Apache-2.0
"""Chooses the linear method of a quantized layer on a GPU."""

from __future__ import annotations

import torch

from mizzen.layers.linear_methods.base import LinearMethod, LinearSpec
from mizzen.layers.linear_methods.dequantized import DequantizedLinear
from mizzen.layers.linear_methods.packed import PackedLinear
from mizzen.layers.linear_methods.w8a8 import W8A8Linear, is_w8a8
from mizzen.quantization.schemes import WeightScheme


def make_quantized_linear(spec: LinearSpec, scheme: WeightScheme) -> LinearMethod:
    """Make the fastest linear method for a scheme and a device.

    Hopper GPUs have kernels for bfloat16 models; others dequantize the weights for each multiplication.
    """
    if spec.device.type != "cuda" or spec.dtype != torch.bfloat16:
        return DequantizedLinear(spec, scheme)
    from mizzen.kernels.launch import has_wgmma

    if not has_wgmma(spec.device):
        return DequantizedLinear(spec, scheme)
    return W8A8Linear(spec, scheme) if is_w8a8(spec, scheme) else PackedLinear(spec, scheme)
