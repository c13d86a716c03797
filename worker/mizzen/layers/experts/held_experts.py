# SPDX-License-Identifier: Apache-2.0
"""The part of a layer's experts that a rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from mizzen.layers.context import BuildContext
from mizzen.layers.experts.expert_parts import ExpertParts
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.experts_config import ExpertsConfig


class HeldExperts:
    """Experts of a layer that this rank holds: `held`, and `shard` of their inner elements.

    Attributes:
        config: description of the mixture.
        hidden: number of elements of an input.
        prefix: beginning of the names of the block's tensors.
        held: experts that this rank holds.
        shard: inner elements of each of them that this rank holds.
        parts: shards of their projections.
    """

    def __init__(self, build: BuildContext, experts: ExpertsConfig, hidden: int, prefix: str) -> None:
        self.config, self.hidden, self.prefix = experts, hidden, prefix
        self.held = build.mesh.expert.shard(experts.count, experts.count_field)
        self.shard = build.mesh.expert_width.shard(experts.width, experts.width_field)
        self.parts = ExpertParts(config=experts, hidden=hidden, prefix=prefix, shard=self.shard)
        self.own_count = self.held.stop - self.held.start
        self.indices = self._list_indices(build.device) if self.partial else None

    @property
    def partial(self) -> bool:
        """Whether other ranks hold experts that this rank does not hold."""
        return self.own_count < self.config.count

    def localize(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the indices of experts among those held; `own_count` stands for all others, and for none.

        `chosen` and the result are int64 of the same shape. In `chosen`, the number of experts of the layer
        stands for no expert.
        """
        return chosen if self.indices is None else self.indices[chosen]

    def foreign_targets(self, own: Iterable[WeightTarget]) -> Iterator[WeightTarget]:
        """Yield empty destinations of the tensors of experts on other ranks, if each expert has tensors.

        Thus every rank checks that the checkpoint has all experts. `own` are the destinations of the tensors
        of the experts that this rank holds.
        """
        if not self.parts.separate or not self.partial:
            return
        first = self.parts.expert_prefix(self.held.start)
        samples = [target.without_elements() for target in own if target.name.startswith(first)]
        for expert in (*range(self.held.start), *range(self.held.stop, self.config.count)):
            prefix = self.parts.expert_prefix(expert)
            for sample in samples:
                names = (prefix + name.removeprefix(first) for name in sample.other_names)
                yield replace(sample, name=prefix + sample.name.removeprefix(first), other_names=tuple(names))

    def _list_indices(self, device: torch.device) -> torch.Tensor:
        """Return the index of each expert of the layer among those held, int64 [experts + 1].

        Experts of other ranks, and the one behind the last expert, which padding chooses, have the index
        `own_count`.
        """
        indices = torch.full((self.config.count + 1,), self.own_count, dtype=torch.int64, device=device)
        indices[self.held] = torch.arange(self.own_count, device=device)
        return indices
