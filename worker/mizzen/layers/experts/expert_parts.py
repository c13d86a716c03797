# SPDX-License-Identifier: Apache-2.0
"""The projections of each expert as linear layers of the checkpoint, whatever the layout of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mizzen.layers.linear_methods.base import LinearPart
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.experts_config import ExpertLayout, ExpertsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParts:
    """This rank's shards of the projections of all experts.

    In tensors of all experts, each matrix counts as a layer, in which the up rows follow the gate rows.
    """

    config: ExpertsConfig
    hidden: int
    """Number of elements of an input."""
    prefix: str
    """Beginning of the names of the block's tensors."""
    shard: slice
    """Inner elements of each expert that this rank holds."""

    @property
    def separate(self) -> bool:
        """Whether each expert is stored in separate tensors."""
        return self.config.layout is ExpertLayout.SEPARATE

    @property
    def own_width(self) -> int:
        """Number of inner elements that this rank holds."""
        return self.shard.stop - self.shard.start

    def expert_prefix(self, expert: int) -> str:
        """Return the beginning of the names of an expert's tensors, if each expert has tensors."""
        return f"{self.prefix}{self.config.names.experts}.{expert}."

    def gate_up(self, expert: int) -> tuple[LinearPart, ...]:
        """Return gate and up of an expert, as parts of a layer [2 * width of this rank, hidden]."""
        names, width = self.config.names, self.config.width
        parts: list[LinearPart] = []
        for half, name in enumerate(names.gate_up):
            offset = 0 if self.separate else half * width
            parts.append(
                LinearPart(
                    name=self._name(expert, name, names.stacked_gate_up),
                    first_row=half * self.own_width,
                    rows=slice(offset + self.shard.start, offset + self.shard.stop),
                    columns=slice(0, self.hidden),
                    shape=(width if self.separate else 2 * width, self.hidden),
                )
            )
        return tuple(parts)

    def down(self, expert: int) -> tuple[LinearPart, ...]:
        """Return the down projection of an expert, as the only part of a layer."""
        names = self.config.names
        part = LinearPart(
            name=self._name(expert, names.down, names.stacked_down),
            first_row=0,
            rows=slice(0, self.hidden),
            columns=self.shard,
            shape=(self.hidden, self.config.width),
        )
        return (part,)

    def in_checkpoint(self, expert: int, target: WeightTarget) -> WeightTarget:
        """Return the destination of the checkpoint's tensor for that of a tensor of an expert.

        The name of `target` ends with `.weight` or `.weight_...`. The tensors differ if those of the
        checkpoint hold all experts.
        """
        if self.separate:
            return target
        layer, _, suffix = target.name.rpartition(".")
        order, destination = tuple(range(len(target.shape))), target.destination
        if self.config.layout is ExpertLayout.TRANSPOSED:
            order = order[::-1]
            destination = destination.permute(order)
        return replace(
            target,
            name=layer + suffix.removeprefix("weight"),
            other_names=(),
            shape=(self.config.count, *(target.shape[place] for place in order)),
            other_shapes=(),
            shard=(slice(expert, expert + 1), *(target.shard[place] for place in order)),
            destination=destination[None],
        )

    def _name(self, expert: int, separate: str, stacked: str) -> str:
        """Return the name of an expert's layer, without `.weight`."""
        return self.expert_prefix(expert) + separate if self.separate else self.prefix + stacked
