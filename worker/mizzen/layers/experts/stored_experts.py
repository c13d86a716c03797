# SPDX-License-Identifier: Apache-2.0
"""Loads one projection of all experts from a checkpoint into quantized weights.

The experts of a projection are one merged linear layer, whose parts lie below each other: every format of
`mizzen.layers.quantized` thus serves for experts, too. Only weights in activation order are converted expert
by expert, because each expert has an order of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from mizzen.layers.experts.expert_parts import ExpertParts
from mizzen.layers.experts.quantized_stack import QuantizedExperts, stack_experts
from mizzen.layers.experts.stored_weights import ExpertTensors
from mizzen.layers.linear_methods.base import LinearKind, LinearPart, LinearSpec, list_weight_targets
from mizzen.layers.quantized.canonical import QuantizedWeight
from mizzen.layers.quantized.convert import convert_layer
from mizzen.layers.quantized.round_to_nearest import check_columns, round_weight
from mizzen.layers.quantized.stored_layer import StoredLayer
from mizzen.layers.staging import Staging
from mizzen.layers.weight_target import WeightTarget
from mizzen.quantization.schemes import PackedIntegers, WeightScheme
from mizzen.weights.checkpoint_files import WeightsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """One projection of the experts that a rank holds: gate and up together, or down."""

    parts: ExpertParts
    """Shards of all projections."""
    first: int
    """Index of the first of these experts in the layer."""
    experts: tuple[tuple[LinearPart, ...], ...]
    """Parts of each expert in this projection; `first_row` counts from the expert's first row."""
    rows: int
    """Rows of one expert on this rank."""
    columns: int
    dtype: torch.dtype
    device: torch.device

    def in_checkpoint(self, index: int, target: WeightTarget) -> WeightTarget:
        """Return the destination of the checkpoint's tensor for that of a tensor of `experts[index]`."""
        return self.parts.in_checkpoint(self.first + index, target)

    def spec(self, parts: tuple[LinearPart, ...], rows: int) -> LinearSpec:
        """Return the description of some parts as one linear layer with a number of rows."""
        return LinearSpec(
            parts=parts,
            rows=rows,
            columns=self.columns,
            bias=False,
            kind=LinearKind.COLUMN,
            dtype=self.dtype,
            device=self.device,
        )


class MergedExperts:
    """Tensors of all experts, which are converted as one merged layer."""

    def __init__(self, projection: Projection, scheme: WeightScheme) -> None:
        rows = projection.rows
        self.projection = projection
        self.owners = [index for index, parts in enumerate(projection.experts) for _ in parts]
        parts = tuple(
            replace(part, first_row=index * rows + part.first_row)
            for index, own in enumerate(projection.experts)
            for part in own
        )
        self.layer = StoredLayer(projection.spec(parts, len(projection.experts) * rows), scheme)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        per_part = len(self.layer.layout)
        for index, target in enumerate(self.layer.targets()):
            yield self.projection.in_checkpoint(self.owners[index // per_part], target)

    def take(self) -> QuantizedExperts:
        """Return the loaded weights; see `ExpertTensors`."""
        return QuantizedExperts(weight=convert_layer(self.layer), rows=self.projection.rows)


class OrderedExperts:
    """Tensors of experts in activation order, which are converted expert by expert."""

    def __init__(self, projection: Projection, scheme: WeightScheme) -> None:
        self.projection = projection
        self.layers = [
            StoredLayer(projection.spec(parts, projection.rows), scheme) for parts in projection.experts
        ]

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        for index, layer in enumerate(self.layers):
            for target in layer.targets():
                yield self.projection.in_checkpoint(index, target)

    def take(self) -> QuantizedExperts:
        """Return the loaded weights; see `ExpertTensors`."""
        name, weights = self.layers[0].parts[0].part.name, []
        while self.layers:
            weights.append(convert_layer(self.layers.pop(0)))
        if (joined := stack_experts(weights)) is None:
            raise WeightsError(
                f"the activation orders of {name} and the other experts of its layer have groups of "
                "different sizes, which is not supported: use a checkpoint without activation order"
            )
        return joined


class RoundedExperts:
    """Unquantized tensors of all experts; each expert is quantized as soon as it is loaded."""

    def __init__(self, projection: Projection, scheme: WeightScheme) -> None:
        """Describe the tensors, without allocating them.

        Raises:
            ConfigError: The weights cannot be quantized by the scheme.
        """
        check_columns(projection.experts[0][0].name, projection.columns, scheme)
        self.projection, self.scheme = projection, scheme
        self.weight: QuantizedWeight | None = None
        shape = (projection.rows, projection.columns)
        self.stagings = [
            Staging(shape, projection.dtype, projection.device, partial(self._round, index))
            for index in range(len(projection.experts))
        ]

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        for index, (parts, staging) in enumerate(zip(self.projection.experts, self.stagings, strict=True)):
            for target in list_weight_targets(parts, staging.shape, staging):
                yield self.projection.in_checkpoint(index, target)

    def take(self) -> QuantizedExperts:
        """Return the loaded weights; see `ExpertTensors`."""
        if self.weight is None:
            raise RuntimeError(f"the weight of {self.projection.experts[0][0].name} is not loaded")
        return QuantizedExperts(weight=self.weight, rows=self.projection.rows)

    def _round(self, index: int, weight: torch.Tensor) -> None:
        """Quantize the weight [rows, columns] of one expert."""
        rounded, rows = round_weight(weight, self.scheme), self.projection.rows
        if self.weight is None:
            total = len(self.stagings) * rows
            self.weight = replace(
                rounded,
                values=rounded.values.new_empty(total, rounded.values.shape[1]),
                scales=rounded.scales.new_empty(total, rounded.scales.shape[1]),
            )
        own = slice(index * rows, (index + 1) * rows)
        self.weight.values[own].copy_(rounded.values)
        self.weight.scales[own].copy_(rounded.scales)


def make_tensors(projection: Projection, scheme: WeightScheme, *, online: bool) -> ExpertTensors:
    """Describe the tensors of a projection.

    Args:
        projection: The projection.
        scheme: Scheme of all experts.
        online: Whether the checkpoint's weights are unquantized, and quantized while they are loaded.

    Raises:
        ConfigError: The weights cannot be quantized by the scheme.
    """
    if online:
        return RoundedExperts(projection, scheme)
    if isinstance(scheme, PackedIntegers) and scheme.activation_order:
        return OrderedExperts(projection, scheme)
    return MergedExperts(projection, scheme)
