# SPDX-License-Identifier: Apache-2.0
"""`BuildContext`: the settings with which layers are built on one rank.

`mizzen.engine.loading.model_setup` makes one `BuildContext` for each model; layers only read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mizzen.layers.linear_methods.base import (
    LinearFactory,
    LinearKind,
    LinearMethod,
    LinearPart,
    LinearSpec,
    MeasuredWeights,
)
from mizzen.layers.linear_methods.unquantized import UnquantizedLinear
from mizzen.layers.sharding import Mesh
from mizzen.parallel.collectives import Collectives, SingleRank


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Settings with which all layers of a model are built on one rank."""

    device: torch.device
    dtype: torch.dtype
    mesh: Mesh = field(default_factory=Mesh)
    make_linear: LinearFactory = UnquantizedLinear
    fused: bool = False
    """Whether layers use the fused kernels of `mizzen.kernels` instead of PyTorch operations; GPUs only."""
    counts_experts: bool = False
    """Whether this rank counts the tokens of each expert."""
    collectives: Collectives = field(default_factory=SingleRank)
    """Collective operations over the ranks of the tensor axis."""
    methods: list[MeasuredWeights] = field(default_factory=list[MeasuredWeights])
    """All linear methods that were made, and all quantized experts."""

    def linear(
        self,
        kind: LinearKind,
        parts: tuple[LinearPart, ...],
        *,
        rows: int,
        columns: int,
        bias: bool,
        swiglu: bool = False,
    ) -> LinearMethod:
        """Make the linear method of a layer with this rank's `rows` and `columns`, on the model's device.

        `swiglu` says that the outputs are those of a SwiGLU block; see `LinearSpec.swiglu`.
        """
        method = self.make_linear(
            LinearSpec(
                parts=parts,
                rows=rows,
                columns=columns,
                bias=bias,
                kind=kind,
                swiglu=swiglu,
                dtype=self.dtype,
                device=self.device,
            )
        )
        self.methods.append(method)
        return method

    def allocate(self, *shape: int) -> torch.Tensor:
        """Allocate an uninitialised parameter of a shape, in the model's dtype and on its device."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)
