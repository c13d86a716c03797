# SPDX-License-Identifier: Apache-2.0
"""Embeddings of images in a batch, with which a decoder replaces those of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Embeddings of images for some tokens of a batch."""

    rows: torch.Tensor
    """Indices of these tokens in the batch, int64 [n], each at most once."""
    embeddings: torch.Tensor
    """Embeddings [n, hidden * (1 + d)] in the model's dtype. The first part [n, hidden] replaces the token
    embeddings. The other d parts are added to the residual stream after the first d layers, as in DeepStack
    (arXiv 2406.04334)."""

    def split(self, hidden: int) -> tuple[torch.Tensor, ...]:
        """Return the parts of the embeddings, [n, hidden] each."""
        return self.embeddings.split(hidden, dim=1)
