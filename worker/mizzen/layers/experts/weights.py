# SPDX-License-Identifier: Apache-2.0
"""Weights of the experts of one layer, in one parameter for gate and up, and one for down projections."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from mizzen.layers.context import BuildContext
from mizzen.layers.experts.biases import allocate_biases, bias_targets, fill_for_inputs
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.experts_config import ExpertLayout, ExpertsConfig


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
        self.own_width = self.shard.stop - self.shard.start
        self.gate_up = build.allocate(self.own_count, 2 * self.own_width, hidden)
        self.down = build.allocate(self.own_count, hidden, self.own_width)
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

    def slots(self) -> Iterator[tuple[int, int]]:
        """Yield the number in the layer, and the index in the parameters, of each expert held."""
        return zip(range(self.held.start, self.held.stop), range(self.own_count), strict=True)

    def holds(self, expert: int) -> bool:
        """Return whether this rank holds an expert of the layer."""
        return self.held.start <= expert < self.held.stop

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        if self.config.layout is ExpertLayout.SEPARATE:
            yield from self.separate_targets()
        elif self.config.interleaved:
            yield from self.interleaved_targets()
        else:
            yield from self.stacked_targets()
        if self.biases is not None:
            yield from bias_targets(self.biases, self.config, self.hidden, self.held, self.shard, self.prefix)

    def halves(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the gate rows and of the up rows of [..., 2 * width of this rank, hidden]."""
        return gate_up[..., : self.own_width, :], gate_up[..., self.own_width :, :]

    def separate_targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of tensors that hold one expert each.

        Those of experts on other ranks are empty: every rank checks that the checkpoint has all experts.
        """
        for expert in range(self.config.count):
            if self.holds(expert):
                yield from self.expert_targets(expert, expert - self.held.start)
            else:
                yield from (target.without_elements() for target in self.expert_targets(expert, 0))

    def expert_targets(self, expert: int, index: int) -> Iterator[WeightTarget]:
        """Yield the destinations of the tensors of an expert, whose index in the parameters is `index`."""
        names, columns = self.config.names, slice(0, self.hidden)
        prefix = f"{self.prefix}{names.experts}.{expert}."
        for name, half in zip(names.gate_up, self.halves(self.gate_up[index]), strict=True):
            yield WeightTarget(
                name=f"{prefix}{name}.weight",
                shape=(self.config.width, self.hidden),
                shard=(self.shard, columns),
                destination=half,
            )
        yield WeightTarget(
            name=f"{prefix}{names.down}.weight",
            shape=(self.hidden, self.config.width),
            shard=(columns, self.shard),
            destination=self.down[index],
        )

    def stacked_targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of each expert's part of tensors that hold all experts."""
        names, width, shard = self.config.names, self.config.width, self.shard
        transposed = self.config.layout is ExpertLayout.TRANSPOSED
        up_shard = slice(shard.start + width, shard.stop + width)
        for expert, index in self.slots():
            gate, up = self.halves(self.gate_up[index])
            down = self.down[index].t()
            for rows, half in ((shard, gate), (up_shard, up)):
                yield self.part(names.stacked_gate_up, 2 * width, expert, rows, half, transposed)
            yield self.part(names.stacked_down, width, expert, shard, down, not transposed)

    def interleaved_targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of tensors that hold all experts, with alternating gate and up."""
        count, width, rows = self.config.count, self.config.width, slice(0, self.hidden)
        pairs = self.gate_up.unflatten(1, (2, self.own_width)).permute(0, 3, 2, 1)
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

    def part(
        self, name: str, total: int, expert: int, rows: slice, destination: torch.Tensor, swapped: bool
    ) -> WeightTarget:
        """Return the destination of an expert's part of a tensor [experts, total, hidden].

        Args:
            name: Name of the tensor, behind that of the block.
            total: Number of inner elements of an expert in the tensor.
            expert: Index of the expert.
            rows: Inner elements that this rank holds.
            destination: View [rows, hidden] of the parameter.
            swapped: Whether the tensor is [experts, hidden, total] instead.
        """
        sizes, part = (total, self.hidden), (rows, slice(0, self.hidden))
        return WeightTarget(
            name=self.prefix + name,
            shape=(self.config.count, *(sizes[::-1] if swapped else sizes)),
            shard=(slice(expert, expert + 1), *(part[::-1] if swapped else part)),
            destination=(destination.t() if swapped else destination)[None],
        )
