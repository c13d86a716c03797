# SPDX-License-Identifier: Apache-2.0
"""Feed-forward blocks: with a gate, as SwiGLU (arXiv 2002.05202), or without."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch

from mizzen.layers.activation import make_activation
from mizzen.layers.context import BuildContext
from mizzen.layers.linear import MergedColumnParallelLinear, RowParallelLinear, name_rows
from mizzen.layers.linear_methods.base import InputNorm, LinearMethod
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.config import ModelConfig

if TYPE_CHECKING:
    from mizzen.kernels.nvrtc import KernelSpec


class MLP:
    """Feed-forward block down(act(gate(x)) * up(x)), with gate and up in one GEMM, or down(act(up(x)))."""

    def __init__(
        self,
        build: BuildContext,
        config: ModelConfig,
        prefix: str,
        *,
        size: int = 0,
        field: str = "intermediate_size",
    ) -> None:
        """Make the block.

        Args:
            build: Settings of this rank.
            config: Shape of the model.
            prefix: Beginning of the names of the block's tensors.
            size: Number of inner elements on all ranks; `intermediate_size` of the model by default.
            field: Field of config.json with that number, for error messages.
        """
        block, size = config.block, size or config.intermediate_size
        names, bias = block.names, config.mlp_bias
        shard = build.mesh.tensor.shard(size, field)
        count = len(names.gate_up)
        layers = name_rows([prefix + name for name in names.gate_up], [size] * count, [shard] * count)
        self.gate_up = MergedColumnParallelLinear(
            build, layers, config.hidden_size, bias, swiglu=block.has_swiglu
        )
        self.down = RowParallelLinear(build, prefix + names.down, config.hidden_size, size, bias)
        self.activation = make_activation(build, block, prefix)
        self.gate = self.activation if block.has_gate else None
        self.gate_up.method.set_consumer(self.down.method)
        self.gate_up.method.set_next(self.down.method)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        yield from self.gate_up.targets()
        yield from self.activation.targets()
        yield from self.down.targets()

    def finish(self) -> None:
        """Prepare the loaded weights."""
        self.activation.finish()
        self.gate_up.method.finish()
        self.down.method.finish()

    def apply_after_norm(
        self, norm: InputNorm, x: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `x` to the residual stream, normalise it, and apply all of the block but its last projection.

        Args:
            norm: Norm between the residual stream and the block.
            x: This rank's output [tokens, hidden] of the attention; its sum over ranks is added to the
                residual stream. None if the stream already contains the sum.
            residual: Residual stream [tokens, hidden]; may be updated in place.

        Returns:
            The input [tokens, intermediate of this rank] of `down`, and the residual stream with `x` added.
        """
        middle, residual = self.gate_up.apply_after_norm(norm, x, residual, self.gate)
        return self.activate(middle), residual

    def activate(self, middle: torch.Tensor) -> torch.Tensor:
        """Apply the activation to the outputs of `gate_up`, unless the gate has already applied it."""
        return middle if self.gate is not None else self.activation(middle)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to x [tokens, hidden]; return this rank's partial sum [tokens, hidden]."""
        return self.down(self.activate(self.gate_up(x, self.gate)))

    def gate_up_methods(self) -> list[LinearMethod]:
        """Return the linear methods whose outputs are gate and up."""
        return [self.gate_up.method]

    def kernel_specs(self, batch_sizes: Collection[int]) -> set[KernelSpec]:
        """Return the specs of kernels to compile at start-up for these batch sizes."""
        specs = self.gate_up.method.kernel_specs(batch_sizes, activation=self.gate)
        return specs | self.down.method.kernel_specs(batch_sizes)
