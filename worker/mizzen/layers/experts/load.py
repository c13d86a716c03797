# SPDX-License-Identifier: Apache-2.0
"""Counts on the device how many tokens each expert of each layer has been chosen for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class ChoosingLayer(Protocol):
    """A layer with experts."""

    chosen: torch.Tensor | None
    """Choice of the last step, int64 [tokens, experts per token]; None if it was taken."""
    live: torch.Tensor | None
    """Rows of the last step that are not padding, bool [tokens]; None if all are."""


class ExpertLoad:
    """Counts of the choices of all layers with experts.

    A few kernels at the end of a step count the choices of all layers. CUDA graphs capture them, and they do
    not wait for the host.
    """

    def __init__(
        self,
        mixtures: Sequence[ChoosingLayer],
        layers: tuple[int, ...],
        experts: int,
        device: torch.device,
        *,
        last_layer_narrows: bool,
    ) -> None:
        """Allocate the counts.

        Args:
            mixtures: Layers with experts, in order.
            layers: Index of each of them in the model.
            experts: Number of experts of a layer.
            device: Device of the model.
            last_layer_narrows: Whether the last of them is the last layer of the model, which drops tokens.
        """
        self.mixtures, self.layers, self.last_layer_narrows = mixtures, layers, last_layer_narrows
        self.experts = experts
        columns = experts + 2
        self.counts = torch.zeros(len(layers), columns, dtype=torch.int64, device=device)
        """Choices of each expert, then those of no expert by tokens and by padding,
        int64 [layers with experts, experts + 2]."""
        self.starts = torch.arange(len(layers), device=device)[:, None, None] * columns

    def add_step(self, *, narrowed: bool) -> None:
        """Count the choices of a step; `narrowed` says that the last layer of the model dropped tokens."""
        steps = [(mixture.chosen, mixture.live) for mixture in self.mixtures if mixture.chosen is not None]
        for mixture in self.mixtures:
            mixture.chosen = None  # the memory is needed again
        whole = len(steps) - (narrowed and self.last_layer_narrows)
        self._add(0, steps[:whole])
        self._add(whole, steps[whole:])

    def _add(self, first: int, steps: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Count choices of layers from the `first` on, which have the same tokens."""
        if not steps:
            return
        chosen, live = torch.stack([chosen for chosen, _ in steps]), steps[0][1]
        # A router never chooses an index above the number of experts, which stands for no expert.
        if live is not None:
            chosen.add_(((chosen == self.experts) & ~live[:, None]).long())
        places = chosen.add_(self.starts[first : first + len(steps)]).flatten()
        self.counts.view(-1).index_add_(0, places, torch.ones_like(places))
