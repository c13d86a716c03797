# SPDX-License-Identifier: Apache-2.0
"""Embeddings of images in a batch, with which a decoder replaces those of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class BatchImages(Protocol):
    """Embeddings of the images of a batch.

    An embedding has 1 + d parts [hidden]. The first one replaces the embedding of a token. The others are
    added to the residual stream after the first d layers, as in DeepStack (arXiv 2406.04334).
    """

    def layers(self, hidden: int) -> int:
        """Return d, the number of layers after which parts are added, for a model of this hidden size."""
        ...

    def replace_tokens(self, residual: torch.Tensor) -> None:
        """Write the first parts into the embeddings of all tokens, `residual` [tokens, hidden]."""
        ...

    def add_part(self, residual: torch.Tensor, layer: int) -> None:
        """Add the parts for the output of a layer to the residual stream [tokens, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Embeddings of images for some tokens of a batch."""

    rows: torch.Tensor
    """Indices of these tokens in the batch, int64 [n], each at most once."""
    embeddings: torch.Tensor
    """Embeddings [n, hidden * (1 + d)] in the model's dtype; see `BatchImages`."""

    def layers(self, hidden: int) -> int:
        """Return the number of layers after which parts are added."""
        return self.embeddings.shape[1] // hidden - 1

    def replace_tokens(self, residual: torch.Tensor) -> None:
        """Write the first parts into the embeddings of all tokens, `residual` [tokens, hidden]."""
        residual.index_copy_(0, self.rows, self._part(0, residual.shape[1]))

    def add_part(self, residual: torch.Tensor, layer: int) -> None:
        """Add the parts for the output of a layer to the residual stream [tokens, hidden]."""
        residual.index_add_(0, self.rows, self._part(layer + 1, residual.shape[1]))

    def _part(self, index: int, hidden: int) -> torch.Tensor:
        return self.embeddings[:, index * hidden : (index + 1) * hidden]


@dataclass(frozen=True, slots=True)
class TableImages:
    """Embeddings of images in a table, with an index for each token, so that a CUDA graph runs any batch."""

    table: torch.Tensor
    """Embeddings [capacity, hidden * (1 + d)] in the model's dtype; see `BatchImages`."""
    rows: torch.Tensor
    """Row of the table for each token, integers [tokens]; any row for tokens without an image."""
    lacks_image: torch.Tensor
    """Tokens without an image, bool [tokens, 1]."""

    @classmethod
    def from_indices(cls, table: torch.Tensor, indices: torch.Tensor) -> TableImages:
        """Return the images of tokens, given the row of each in the table, or a negative number for none."""
        return cls(table, indices.clamp(min=0), (indices < 0)[:, None])

    def layers(self, hidden: int) -> int:
        """Return the number of layers after which parts are added."""
        return self.table.shape[1] // hidden - 1

    def replace_tokens(self, residual: torch.Tensor) -> None:
        """Write the first parts into the embeddings of all tokens, `residual` [tokens, hidden]."""
        residual.copy_(torch.where(self.lacks_image, residual, self._gather(0, residual.shape[1])))

    def add_part(self, residual: torch.Tensor, layer: int) -> None:
        """Add the parts for the output of a layer to the residual stream [tokens, hidden]."""
        part = self._gather(layer + 1, residual.shape[1])
        # Rows of the table that no image uses may hold anything, also infinities, so no product masks them.
        residual.add_(part.masked_fill_(self.lacks_image, 0))

    def _gather(self, index: int, hidden: int) -> torch.Tensor:
        part = self.table[:, index * hidden : (index + 1) * hidden]
        return part.index_select(0, self.rows)
