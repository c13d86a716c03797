"""Unquantized weights, multiplied by PyTorch's GEMMs (cuBLAS on a GPU)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from mizzen.layers.linear_methods.base import CheckpointShard
from mizzen.layers.weight_target import WeightTarget


class UnquantizedLinear:
    """Unquantized weights: `weight` [rows, columns] and an optional `bias` [rows], in the model's dtype."""

    def __init__(self, rows: int, columns: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(rows, columns, dtype=dtype, device=device)
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None

    def targets(self, name: str, shard: CheckpointShard) -> Iterator[WeightTarget]:
        """Yield the destinations of the tensors of checkpoint layer `name`; this rank needs `shard` of it."""
        own_rows = slice(shard.first_row, shard.first_row + shard.rows.stop - shard.rows.start)
        yield WeightTarget(
            name=f"{name}.weight",
            shape=shard.shape,
            shard=(shard.rows, shard.columns),
            destination=self.weight[own_rows],
        )
        if self.bias is not None:
            yield WeightTarget(
                name=f"{name}.bias",
                shape=shard.shape[:1],
                shard=(shard.rows,),
                destination=self.bias[own_rows],
            )

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [tokens, columns]; return [tokens, rows], in `out` if given."""
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)
