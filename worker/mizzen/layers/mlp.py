"""The SwiGLU feed-forward block (arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mizzen.layers.context import BuildContext
from mizzen.layers.linear import MergedColumnParallelLinear, OutputRows, RowParallelLinear
from mizzen.layers.norm import RMSNorm
from mizzen.layers.weight_target import WeightTarget


class SwiGLUMLP:
    """Feed-forward block down(silu(gate(x)) * up(x)), with gate and up in one GEMM."""

    def __init__(self, build: BuildContext, hidden: int, intermediate: int, bias: bool) -> None:
        rows = OutputRows(intermediate, build.mesh.tensor.shard(intermediate, "intermediate_size"))
        rows_by_name = {"gate_proj": rows, "up_proj": rows}
        self.gate_up = MergedColumnParallelLinear(build, rows_by_name, hidden, bias)
        self.down = RowParallelLinear(build, "down_proj", hidden, intermediate, bias)

    def targets(self, prefix: str) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors under `prefix`."""
        yield from self.gate_up.targets(prefix)
        yield from self.down.targets(prefix)

    def __call__(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Add `x` to the residual stream, normalise it and apply the block.

        Args:
            norm: Norm between the residual stream and the block.
            x: This rank's output [tokens, hidden] of the attention; its sum over ranks is added to the
                residual stream. None if the stream already contains the sum.
            residual: Residual stream [tokens, hidden]; may be updated in place.

        Returns:
            Two tensors [tokens, hidden]. The first is the block's output on this rank, to be passed on as the
            `x` of the next block, or None if the residual stream already contains it. The second is the
            residual stream, to which `x` has been added.
        """
        middle, residual = self.gate_up.apply_after_norm(norm, x, residual, swiglu=True)
        return self.down.add_to_residual(residual, middle), residual
