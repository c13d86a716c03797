"""What layers need to know to allocate their weights, and how a checkpoint finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from mizzen.layers.sharding import Mesh
from mizzen.parallel.collectives import SingleRank, Collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTarget:
    """Where one tensor of a checkpoint goes."""

    name: str
    """Its name in the checkpoint."""
    shape: tuple[int, ...]
    """Its whole shape there."""
    part: tuple[slice, ...]
    """What of it this rank holds; may be nothing."""
    into: torch.Tensor
    """A view of the parameter, of the part's shape."""
    ones: bool = False
    """A scale, around 1: what a dummy checkpoint fills in."""


class LinearMethod(Protocol):
    """Holds the weights of one linear layer and applies them.

    The seam for quantization, adapters and weight updates: whatever the form of the weights, their tensors
    keep their addresses once loaded, so that captured graphs stay valid.
    """

    def targets(self, name: str, part: CheckpointShard) -> Iterator[WeightTarget]:
        """Yield where the tensors of the checkpoint's layer `name` go."""
        ...

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map [tokens, columns] to [tokens, rows], into `out` where it is given; its rows may lie apart."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointShard:
    """A layer of the checkpoint inside a (merged, sharded) linear layer."""

    start: int
    """Its first output row here."""
    rows: slice
    """Its output rows, of the checkpoint's, that this rank holds."""
    columns: slice
    """Its input columns, of the checkpoint's, that this rank holds."""
    shape: tuple[int, int]
    """The checkpoint's whole [rows, columns]."""


LinearFactory = Callable[[int, int, bool, torch.dtype, torch.device], LinearMethod]
"""Makes the weights of a layer from rows, columns, bias, dtype and device."""


def dense(rows: int, columns: int, bias: bool, dtype: torch.dtype, device: torch.device) -> LinearMethod:
    """Make plain weights."""
    from mizzen.layers.linear import UnquantizedLinear

    return UnquantizedLinear(rows, columns, bias, dtype, device)


def skinny(rows: int, columns: int, bias: bool, dtype: torch.dtype, device: torch.device) -> LinearMethod:
    """Make plain weights that a single row has a kernel of its own for, on a GPU."""
    from mizzen.layers.linear import SmallBatchLinear

    return SmallBatchLinear(rows, columns, bias, dtype, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """How a model is built on one rank."""

    device: torch.device
    dtype: torch.dtype
    mesh: Mesh = field(default_factory=Mesh)
    linear: LinearFactory = dense
    fused: bool = False
    """Use the kernels of `mizzen.kernels` in place of several plain operations; on a GPU alone."""
    ranks: Collectives = field(default_factory=SingleRank)
    """What this rank and the others of the tensor axis exchange."""

    def empty(self, *shape: int) -> torch.Tensor:
        """Allocate a parameter."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)
