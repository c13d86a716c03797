# SPDX-License-Identifier: Apache-2.0
"""Weights of the experts of one layer, in one parameter for gate and up, and one for down projections."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mizzen.layers.context import BuildContext
from mizzen.layers.experts.biases import allocate_biases, bias_targets, fill_for_inputs
from mizzen.layers.experts.held_experts import HeldExperts
from mizzen.layers.linear_methods.base import list_weight_targets
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.experts_config import ExpertsConfig


class ExpertWeights(HeldExperts):
    """Weights of the experts of a layer that this rank holds.

    `gate_up` is [experts held, 2 * width of this rank, hidden], gate before up, and `down` is
    [experts held, hidden, width of this rank]. `biases` are those of both, if the experts have any.
    """

    def __init__(self, build: BuildContext, experts: ExpertsConfig, hidden: int, prefix: str) -> None:
        super().__init__(build, experts, hidden, prefix)
        own_width = self.parts.own_width
        self.gate_up = build.allocate(self.own_count, 2 * own_width, hidden)
        self.down = build.allocate(self.own_count, hidden, own_width)
        self.biases = allocate_biases(build, experts, hidden)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        if self.config.interleaved:
            yield from self.interleaved_targets()
        else:
            yield from self.all_expert_targets()
        if self.biases is not None:
            yield from bias_targets(self.biases, self.config, self.hidden, self.held, self.shard, self.prefix)

    def all_expert_targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of each expert's tensors, or of its parts of tensors of all experts."""
        for index in range(self.own_count):
            yield from self.expert_targets(self.held.start + index, index)
        yield from self.foreign_targets(self.expert_targets(self.held.start, 0))

    def expert_targets(self, expert: int, index: int) -> Iterator[WeightTarget]:
        """Yield the destinations of the tensors of an expert, whose index in the parameters is `index`."""
        gate_up = list_weight_targets(self.parts.gate_up(expert), self.gate_up[index])
        down = list_weight_targets(self.parts.down(expert), self.down[index])
        for target in (*gate_up, *down):
            yield self.parts.in_checkpoint(expert, target)

    def interleaved_targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of tensors that hold all experts, with alternating gate and up."""
        count, width, rows = self.config.count, self.config.width, slice(0, self.hidden)
        pairs = self.gate_up.unflatten(1, (2, self.parts.own_width)).permute(0, 3, 2, 1)
        yield WeightTarget(
            name=self.prefix + self.config.names.stacked_gate_up,
            shape=(count, self.hidden, width, 2),
            other_shapes=((count, self.hidden, 2 * width),),
            shard=(self.held, rows, self.shard, slice(0, 2)),
            destination=pairs,
            fill=partial(fill_for_inputs, self.hidden),
        )
        yield WeightTarget(
            name=self.prefix + self.config.names.stacked_down,
            shape=(count, width, self.hidden),
            shard=(self.held, self.shard, rows),
            destination=self.down.transpose(1, 2),
            fill=partial(fill_for_inputs, width),
        )
