# SPDX-License-Identifier: Apache-2.0
"""Counts on the device how many tokens each expert of each layer has been chosen for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from mizzen.attention.base import StepAttention


class ChoosingLayer(Protocol):
    """A layer with experts."""

    chosen: torch.Tensor | None
    """Choice of the last step, int64 [tokens, experts per token]; None if it was taken."""


class ExpertLoad:
    """Counts of the choices of all layers with experts, int64 [layers with experts, experts].

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
        self.counts = torch.zeros(len(layers), experts, dtype=torch.int64, device=device)
        self.starts = torch.arange(len(layers), device=device)[:, None, None] * experts

    def add_step(self, attend: StepAttention, rows: torch.Tensor | None) -> None:
        """Count the choices of a step.

        Args:
            attend: Attention of the step.
            rows: Indices of the tokens with which the last layer of the model continued after its attention,
                int64; None for all. Only those above the index before them are counted, because zeros pad the
                rows of graphs. This is not exact in steps with prompt outputs, whose rows follow the others.
        """
        choices = []
        for mixture in self.mixtures:
            if mixture.chosen is not None:
                choices.append(mixture.chosen)
            mixture.chosen = None  # the memory is needed again
        real = find_real_tokens(attend)
        if rows is None or not self.last_layer_narrows:
            self._add(0, choices, real)
            return
        self._add(0, choices[:-1], real)
        fresh = torch.ones_like(rows, dtype=torch.bool)
        fresh[1:] = rows[1:] > rows[:-1]
        self._add(len(choices) - 1, choices[-1:], fresh if real is None else real[rows] & fresh)

    def _add(self, first: int, choices: list[torch.Tensor], real: torch.Tensor | None) -> None:
        """Count choices of layers from the `first` on, for the tokens in `real` (bool [tokens])."""
        if not choices:
            return
        places = torch.stack(choices).add_(self.starts[first : first + len(choices)])
        counted = torch.ones_like(places) if real is None else real.long()[:, None].expand_as(places)
        self.counts.view(-1).index_add_(0, places.flatten(), counted.flatten())


def find_real_tokens(attend: StepAttention) -> torch.Tensor | None:
    """Return which tokens of a step are not padding, bool [tokens]; None if all are.

    Only captured graphs have padding. Its keys and values are stored in the last page.
    """
    if not attend.slot_mapping.is_cuda:
        return None
    return attend.slot_mapping < attend.kv.keys.shape[1] - attend.kv.page_size
