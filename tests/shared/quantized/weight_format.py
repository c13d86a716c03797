# SPDX-License-Identifier: Apache-2.0
"""Interface of the reference formats of quantized weights, each with a quantizer and a reader in NumPy.

The references follow the descriptions of the formats and share no code with Mizzen, so that tests can compare
Mizzen with them. Weights are float32 matrices [rows, columns], that is, [outputs, inputs].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

Tensors = Mapping[str, torch.Tensor]
"""Tensors of one linear layer, by the last part of their names, such as "qweight"."""


class WeightFormat(ABC):
    """A format in which checkpoints store quantized weights of linear layers."""

    config_file = "config.json"
    """File that describes the quantization: config.json (field `quantization_config`), or another file."""
    kv_scales: Sequence[str] = ()
    """Names of the scales of the KV cache that the format stores beside the layers k_proj and v_proj."""
    scale_name = "weight_scale"
    """Name of the tensor with the scales of the weights."""

    @abstractmethod
    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return the description in `config_file`, as the usual tool writes it.

        `ignored` lists the names of the layers that are not quantized.
        """

    @abstractmethod
    def quantize(self, weight: np.ndarray, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Round a weight to nearest; return the tensors of the layer.

        `rng` draws orders of columns and scales of activations, where the format has them.
        """

    @abstractmethod
    def dequantize(self, tensors: Tensors) -> np.ndarray:
        """Return the float32 weight that a layer's tensors stand for; an element is rounded once at most."""


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array; e4m3 as its uint8 codes, other floating-point types as float32."""
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy()
    return tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()


def draw_input_scale(rng: np.random.Generator, largest: float) -> torch.Tensor:
    """Return a static scale of activations up to 4 to 8, float32 [], for codes up to `largest`."""
    return torch.tensor(rng.uniform(4, 8) / largest, dtype=torch.float32)
