# SPDX-License-Identifier: Apache-2.0
"""Destinations of checkpoint tensors in a model's parameters.

Every layer yields a `WeightTarget` for each checkpoint tensor that it needs; `mizzen.weights` fills them.
Parameters keep their addresses once loaded, because captured CUDA graphs refer to them.
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
    """Part of the tensor that this rank holds, one slice per dimension; may be empty."""
    destination: torch.Tensor
    """View of the parameter, with the shape of the shard."""
    fill: float | None = None
    """Value of all elements of dummy weights; None for random values, as in a weight matrix."""
