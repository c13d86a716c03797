# SPDX-License-Identifier: Apache-2.0
"""Biases of the experts of one layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from mizzen.layers.context import BuildContext
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.experts_config import ExpertsConfig


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    """Biases of the experts of a layer that a rank holds, as it adds them."""

    gate_up: torch.Tensor
    """Biases of gate and up [experts held, 2 * width of this rank]."""
    down: torch.Tensor | None
    """Biases of the down projections [experts held, hidden]; None if another rank adds them: the sum of ranks
    must contain them once."""


def allocate_biases(build: BuildContext, experts: ExpertsConfig, hidden: int) -> ExpertBiases | None:
    """Allocate the biases that this rank adds, if the experts have any.

    Of the ranks that share the width of an expert, the first adds the bias of `down`.
    """
    if not experts.biases:
        return None
    shared = build.mesh.expert_width
    own_count, own_width = experts.count // build.mesh.expert.size, experts.width // shared.size
    down = build.allocate(own_count, hidden) if shared.rank == 0 else None
    return ExpertBiases(build.allocate(own_count, 2 * own_width), down)


def bias_targets(
    biases: ExpertBiases, experts: ExpertsConfig, hidden: int, held: slice, shard: slice, prefix: str
) -> Iterator[WeightTarget]:
    """Yield the destinations of the biases of all experts, with alternating gate and up.

    Args:
        biases: Parameters of this rank.
        experts: Description of the mixture.
        hidden: Number of outputs of an expert.
        held: Experts that this rank holds.
        shard: Inner elements that this rank holds.
        prefix: Beginning of the names of the block's tensors.
    """
    count, width, names = experts.count, experts.width, experts.names
    gate_up = biases.gate_up
    yield WeightTarget(
        name=prefix + names.stacked_gate_up_bias,
        shape=(count, width, 2),
        other_shapes=((count, 2 * width),),
        shard=(held, shard, slice(0, 2)),
        destination=gate_up.unflatten(1, (2, -1)).transpose(1, 2),
        fill=partial(fill_for_inputs, hidden),
    )
    down = gate_up.new_empty(len(gate_up), 0) if biases.down is None else biases.down
    yield WeightTarget(
        name=prefix + names.stacked_down_bias,
        shape=(count, hidden),
        shard=(held, slice(0, down.shape[1])),
        destination=down,
        fill=partial(fill_for_inputs, width),
    )


def fill_for_inputs(inputs: int, weight: torch.Tensor, generator: torch.Generator) -> None:
    """Fill weights with random values so small that a sum over `inputs` inputs is about as large as one."""
    weight.normal_(0, 1 / math.sqrt(inputs), generator=generator)
