"""The interface of linear methods: a class for every form in which the weights of a linear layer are stored.

`BuildContext.make_linear` makes one for each layer. This is the seam for quantization: a method decides which
tensors it loads and how it multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from mizzen.layers.weight_target import WeightTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointShard:
    """This rank's shard of one checkpoint layer inside a (merged, sharded) linear layer."""

    first_row: int
    """First output row of the shard in the merged layer."""
    rows: slice
    """Output rows of the checkpoint layer that this rank holds."""
    columns: slice
    """Input columns of the checkpoint layer that this rank holds."""
    shape: tuple[int, int]
    """Full [rows, columns] of the checkpoint layer."""


class LinearMethod(Protocol):
    """Holds the weights of one linear layer and multiplies by them.

    In whatever form the weights are stored, their tensors keep their addresses once loaded, so that captured
    graphs stay valid.
    """

    def targets(self, name: str, shard: CheckpointShard) -> Iterator[WeightTarget]:
        """Yield the destinations of the tensors of checkpoint layer `name`."""
        ...

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map [tokens, columns] to [tokens, rows], into `out` if given; rows of `out` may be strided."""
        ...


LinearFactory = Callable[[int, int, bool, torch.dtype, torch.device], LinearMethod]
"""(rows, columns, bias, dtype, device): makes the linear method of one layer."""
