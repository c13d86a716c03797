# SPDX-License-Identifier: Apache-2.0
"""Chooses the linear method of each layer by the scheme in which the checkpoint stores its weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mizzen.layers.linear_methods.base import LinearFactory, LinearMethod, LinearSpec
from mizzen.layers.linear_methods.dequantized import DequantizedLinear
from mizzen.quantization.quantization import Quantization
from mizzen.quantization.schemes import Unquantized, WeightScheme

QuantizedFactory = Callable[[LinearSpec, WeightScheme], LinearMethod]
"""Function that makes the linear method of a quantized layer."""


def choose_linear(
    quantization: Quantization,
    unquantized: LinearFactory,
    quantized: QuantizedFactory = DequantizedLinear,
) -> LinearFactory:
    """Return the factory that makes the linear methods of a model.

    Args:
        quantization: Schemes of the layers.
        unquantized: Factory for layers that are not quantized.
        quantized: Factory for quantized layers.
    """
    if not quantization.schemes:
        return unquantized

    def make_linear(spec: LinearSpec) -> LinearMethod:
        scheme = quantization.find_merged_scheme(dict.fromkeys(part.name for part in spec.parts))
        if isinstance(scheme, Unquantized):
            return unquantized(spec)
        return quantized(replace(spec, online=quantization.online), scheme)

    return make_linear
