# SPDX-License-Identifier: Apache-2.0
"""Weights of the experts of one layer, in one parameter for gate and up, and one for down projections."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from mizzen.layers.context import BuildContext
from mizzen.layers.experts.biases import allocate_biases, bias_targets, fill_for_inputs
from mizzen.layers.experts.expert_parts import ExpertParts
from mizzen.layers.linear_methods.base import list_weight_targets
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.experts_config import ExpertsConfig


class ExpertWeights:
    """Weights of the experts of a layer that this rank holds: `held`, and `shard` of their inner elements.

    `gate_up` is [experts held, 2 * width of this rank, hidden], gate before up, and `down` is
    [experts held, hidden, width of this rank]. `biases` are those of both, if the experts have any.
    """

    def __init__(self, build: BuildContext, experts: ExpertsConfig, hidden: int, prefix: str) -> None:
        self.config, self.hidden, self.prefix = experts, hidden, prefix
        self.held = build.mesh.expert.shard(experts.count, experts.count_field)
        self.shard = build.mesh.expert_width.shard(experts.width, experts.width_field)
        self.own_count = self.held.stop - self.held.start
        self.parts = ExpertParts(config=experts, hidden=hidden, prefix=prefix, shard=self.shard)
        own_width = self.parts.own_width
        self.gate_up = build.allocate(self.own_count, 2 * own_width, hidden)
        self.down = build.allocate(self.own_count, hidden, own_width)
        self.biases = allocate_biases(build, experts, hidden)
        self.indices = self.list_indices(build.device) if self.partial else None

    @property
    def partial(self) -> bool:
        """Whether other ranks hold experts that this rank does not hold."""
        return self.own_count < self.config.count

    def list_indices(self, device: torch.device) -> torch.Tensor:
        """Return the index of each expert of the layer among those held, int64 [experts].

        Experts of other ranks have the index `own_count`.
        """
        indices = torch.full((self.config.count,), self.own_count, dtype=torch.int64, device=device)
        indices[self.held] = torch.arange(self.own_count, device=device)
        return indices

    def localize(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the indices of experts among those held; `own_count` stands for experts of other ranks.

        `chosen` and the result are int64 of the same shape.
        """
        return chosen if self.indices is None else self.indices[chosen]

    def holds(self, expert: int) -> bool:
        """Return whether this rank holds an expert of the layer."""
        return self.held.start <= expert < self.held.stop

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        if self.config.interleaved:
            yield from self.interleaved_targets()
        else:
            yield from self.all_expert_targets()
        if self.biases is not None:
            yield from bias_targets(self.biases, self.config, self.hidden, self.held, self.shard, self.prefix)

    def all_expert_targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of each expert's tensors, or of its parts of tensors that hold all experts.

        Those of separate tensors of experts on other ranks are empty: every rank checks that the checkpoint
        has all experts.
        """
        for expert in range(self.config.count):
            if self.holds(expert):
                yield from self.expert_targets(expert, expert - self.held.start)
            elif self.parts.separate:
                yield from (target.without_elements() for target in self.expert_targets(expert, 0))

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
