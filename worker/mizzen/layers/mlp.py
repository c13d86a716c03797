"""The gated feed-forward block (SwiGLU, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mizzen.layers.context import BuildContext, WeightTarget
from mizzen.layers.linear import RowParallelLinear, MergedColumnParallelLinear, Rows
from mizzen.layers.norm import RMSNorm


class SwiGLUMLP:
    """down(silu(gate(x)) * up(x)), with gate and up as one product."""

    def __init__(self, build: BuildContext, hidden: int, intermediate: int, bias: bool) -> None:
        rows = Rows(intermediate, build.mesh.tensor.shard(intermediate, "intermediate_size"))
        parts = {"gate_proj": rows, "up_proj": rows}
        self.gate_up = MergedColumnParallelLinear(build, parts, hidden, bias)
        self.down = RowParallelLinear(build, "down_proj", hidden, intermediate, bias)

    def targets(self, prefix: str) -> Iterator[WeightTarget]:
        """Yield where the checkpoint's tensors under `prefix` go."""
        yield from self.gate_up.targets(prefix)
        yield from self.down.targets(prefix)

    def __call__(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return this rank's term [tokens, hidden] of the residual stream, and the stream with `x`.

        `norm` is between the stream and the block; `residual` may be updated in place. A term that the stream
        has already, `x` or the one returned, is None.
        """
        middle, residual = self.gate_up.after(norm, x, residual, gate=True)
        return self.down.add_to_residual(residual, middle), residual
