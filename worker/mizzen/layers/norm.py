"""RMSNorm (arXiv 1910.07467)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from mizzen.layers.context import BuildContext
from mizzen.layers.weight_target import WeightTarget


class RMSNorm:
    """Normalises the last dimension to a root mean square of 1, then multiplies it by a learned weight."""

    def __init__(self, build: BuildContext, name: str, size: int, epsilon: float) -> None:
        self.name = name
        self.epsilon = epsilon
        self.weight = build.allocate(size)
        self.fused = build.fused

    def targets(self, prefix: str) -> Iterator[WeightTarget]:
        """Yield the destination of the weight in the checkpoint."""
        size = len(self.weight)
        yield WeightTarget(
            name=f"{prefix}{self.name}.weight",
            shape=(size,),
            shard=(slice(0, size),),
            destination=self.weight,
            is_scale=True,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., size], normalised and multiplied by the weight, in the dtype of x."""
        if self.fused and x.dim() == 2:
            from mizzen.kernels.norm import rms_norm

            return rms_norm(x, self.weight, self.epsilon)
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add x to `residual` in place and return the normalised sum; all three are [tokens, size]."""
        if self.fused:
            from mizzen.kernels.norm import add_rms_norm

            return add_rms_norm(x, residual, self.weight, self.epsilon)
        return self(residual.add_(x))
