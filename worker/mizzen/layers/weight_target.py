"""Destinations of checkpoint tensors.

Every layer yields a `WeightTarget` for each checkpoint tensor that it needs; `mizzen.weights` fills them.
Tensors keep their addresses once loaded, because captured CUDA graphs refer to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTarget:
    """Destination of one checkpoint tensor."""

    name: str
    """Name of the tensor in the checkpoint."""
    shape: tuple[int, ...]
    """Full shape of the tensor in the checkpoint."""
    shard: tuple[slice, ...]
    """Slice of the tensor that this rank holds, by dimension; may be empty."""
    destination: torch.Tensor
    """View of the parameter, of the shard's shape."""
    is_scale: bool = False
    """Whether the tensor is a scale around 1; dummy weights fill it with ones."""
