# SPDX-License-Identifier: Apache-2.0
"""Destinations of checkpoint tensors in a model's parameters.

Every layer yields a `WeightTarget` for each checkpoint tensor that it needs; `mizzen.weights` fills them.
Parameters keep their addresses once loaded, because captured CUDA graphs refer to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mizzen.layers.staging import Staging

DummyFill = Callable[[torch.Tensor, torch.Generator], None]
"""Function that fills a whole tensor [as in the checkpoint] with dummy values in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTarget:
    """Destination of one checkpoint tensor."""

    name: str
    """Name of the tensor in the checkpoint."""
    other_names: tuple[str, ...] = ()
    """Names that the tensor may have instead."""
    dtypes: tuple[str, ...] = ()
    """Dtypes that the tensor may have in the checkpoint, as safetensors names them; empty for any dtype of
    unquantized weights."""
    shape: tuple[int, ...]
    """Full shape of the tensor in the checkpoint."""
    other_shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes that the tensor may have instead, with the same elements in the same order."""
    optional: bool = False
    """Whether the checkpoint may lack the tensor; the destination then keeps its values."""
    shard: tuple[slice, ...]
    """Part of the tensor that this rank holds, one slice per dimension; may be empty."""
    destination: torch.Tensor
    """View of the parameter, with the shape of the shard."""
    staging: Staging | None = None
    """Temporary buffer that is filled instead; `destination` is then a view of its `shape`."""
    fill: float | DummyFill | None = None
    """Value of all elements of dummy weights, or a function that fills the tensor; None for random values, as
    in a weight matrix."""

    def without_elements(self) -> WeightTarget:
        """Return the target of the same tensor for a rank that holds no part of it."""
        nothing = tuple(slice(0, 0) for _ in self.shape)
        destination = self.destination.new_empty([0] * max(1, len(self.shape)))  # a scalar fits into [0]
        return replace(self, shard=nothing, destination=destination, staging=None)
