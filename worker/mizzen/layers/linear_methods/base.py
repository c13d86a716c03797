"""Interface of linear methods: one class for each format in which weights of a linear layer are stored.

`BuildContext.make_linear` makes a linear method for each linear layer. Quantization formats belong here: a
method decides which tensors it loads and how it multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from mizzen.layers.weight_target import WeightTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointShard:
    """This rank's shard of one linear layer of the checkpoint, and its place in a merged layer."""

    first_row: int
    """Output row of the merged layer at which the shard starts."""
    rows: slice
    """Output rows of the checkpoint layer that this rank holds."""
    columns: slice
    """Input columns of the checkpoint layer that this rank holds."""
    shape: tuple[int, int]
    """Full shape [rows, columns] of the checkpoint layer."""


class LinearMethod(Protocol):
    """Weights of one linear layer, and the multiplication by them.

    Whatever their format, the weights keep their addresses once loaded, so that captured graphs stay valid.
    """

    def targets(self, name: str, shard: CheckpointShard) -> Iterator[WeightTarget]:
        """Yield the destinations of the tensors of checkpoint layer `name`; this rank needs `shard` of it."""
        ...

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [tokens, columns]; return [tokens, rows], in `out` (rows may be strided) if given."""
        ...


LinearFactory = Callable[[int, int, bool, torch.dtype, torch.device], LinearMethod]
"""Function (rows, columns, bias, dtype, device) that makes the linear method of one layer."""
