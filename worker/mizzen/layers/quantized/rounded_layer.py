# SPDX-License-Identifier: Apache-2.0
"""Weight of a linear layer that is stored unquantized, and quantized as soon as it is loaded."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mizzen.layers.linear_methods.base import LinearSpec, list_weight_targets
from mizzen.layers.quantized.canonical import QuantizedWeight
from mizzen.layers.quantized.round_to_nearest import check_columns, round_weight
from mizzen.layers.staging import Staging
from mizzen.layers.weight_target import WeightTarget
from mizzen.quantization.schemes import WeightScheme


class RoundedLayer:
    """Unquantized tensors of all parts of a linear layer, which are merged, rounded and freed together.

    A rank rounds only the weights that it holds. If it holds some columns of a row, it computes the scale
    of the row from these columns alone.
    """

    def __init__(self, spec: LinearSpec, scheme: WeightScheme) -> None:
        """Describe the tensors, without allocating them.

        Raises:
            ConfigError: The weight cannot be quantized by the scheme.
        """
        check_columns(spec.parts[0].name, spec.columns, scheme)
        self.spec, self.scheme = spec, scheme
        self._weight: QuantizedWeight | None = None
        self._staging = Staging((spec.rows, spec.columns), spec.dtype, spec.device, self._round)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        yield from list_weight_targets(self.spec.parts, self._staging.shape, self._staging)

    def take_weight(self) -> QuantizedWeight:
        """Return the weight, which this object no longer holds afterwards.

        Raises:
            RuntimeError: The tensors are not loaded.
        """
        if self._weight is None:
            raise RuntimeError(f"the weight of {self.spec.parts[0].name} is not loaded")
        weight, self._weight = self._weight, None
        return weight

    def _round(self, weight: torch.Tensor) -> None:
        self._weight = round_weight(weight, self.scheme)
