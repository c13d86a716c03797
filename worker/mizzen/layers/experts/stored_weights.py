# SPDX-License-Identifier: Apache-2.0
"""Base of the weights of experts that stay quantized in memory, in any format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Protocol

from mizzen.layers.context import BuildContext
from mizzen.layers.experts.biases import allocate_biases, bias_targets
from mizzen.layers.experts.held_experts import HeldExperts
from mizzen.layers.experts.quantized_stack import QuantizedExperts
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.experts_config import ExpertsConfig


class ExpertTensors(Protocol):
    """Tensors of a projection while it is loaded."""

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        ...

    def take(self) -> QuantizedExperts:
        """Return the loaded weights, whose stored tensors are freed.

        Raises:
            WeightsError: A tensor has invalid values.
        """
        ...


class StoredExpertWeights(HeldExperts):
    """Weights of the experts of a layer that a rank holds."""

    def __init__(self, build: BuildContext, experts: ExpertsConfig, hidden: int, prefix: str) -> None:
        """Allocate the biases; a subclass describes the tensors of both projections in `_stored`."""
        super().__init__(build, experts, hidden, prefix)
        self.biases = allocate_biases(build, experts, hidden)
        self.dtype = build.dtype
        """Data type of the model, to which weights are dequantized."""
        self._stored: dict[str, ExpertTensors] = {}
        self._loaded: dict[str, QuantizedExperts] = {}
        build.methods.append(self)

    @property
    def gate_up(self) -> QuantizedExperts:
        """Gate and up projections, [2 * width of this rank, hidden] for each expert, gate before up."""
        return self._find("gate_up")

    @property
    def down(self) -> QuantizedExperts:
        """Down projections, [hidden, width of this rank] for each expert."""
        return self._find("down")

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors; only biases once the weights are converted."""
        for tensors in self._stored.values():
            own = tuple(tensors.targets())
            yield from own
            yield from self.foreign_targets(own)
        if self.biases is not None:
            yield from bias_targets(self.biases, self.config, self.hidden, self.held, self.shard, self.prefix)

    def finish(self) -> None:
        """Convert the stored tensors to the canonical form, and free them.

        Raises:
            WeightsError: A tensor has invalid values.
        """
        for name in list(self._stored):
            self._loaded[name] = self._stored.pop(name).take()

    def format_bytes(self) -> Mapping[str, int]:
        """Return the bytes of the loaded weights with their scales and zero points, by their format."""
        sizes: Counter[str] = Counter()
        for projection in self._loaded.values():
            sizes[projection.weight.format] += projection.size
        return sizes

    def _find(self, name: str) -> QuantizedExperts:
        """Return a loaded projection.

        Raises:
            RuntimeError: It is not loaded.
        """
        if name not in self._loaded:
            raise RuntimeError(f"the experts of {self.prefix} are not loaded")
        return self._loaded[name]
