"""`BuildContext`: what every layer needs to allocate its weights on one rank.

`mizzen.engine.loading.model_setup` makes one for each model; layers only read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mizzen.layers.linear_methods.base import LinearFactory
from mizzen.layers.linear_methods.unquantized import UnquantizedLinear
from mizzen.layers.sharding import Mesh
from mizzen.parallel.collectives import Collectives, SingleRank


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Settings with which a model is built on one rank."""

    device: torch.device
    dtype: torch.dtype
    mesh: Mesh = field(default_factory=Mesh)
    make_linear: LinearFactory = UnquantizedLinear
    fused: bool = False
    """Whether layers use the fused kernels of `mizzen.kernels` instead of plain operations; GPUs only."""
    collectives: Collectives = field(default_factory=SingleRank)
    """Operations among the ranks of the tensor axis."""

    def allocate(self, *shape: int) -> torch.Tensor:
        """Allocate an uninitialised parameter."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)
