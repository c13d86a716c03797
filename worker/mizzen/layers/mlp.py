"""The gated feed-forward block (SwiGLU, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from mizzen.layers.build import Build, Target
from mizzen.layers.linear import InputSplitLinear, MergedLinear


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up as one product."""

    def __init__(self, build: Build, hidden: int, intermediate: int, bias: bool) -> None:
        parts = {"gate_proj": intermediate, "up_proj": intermediate}
        self.gate_up = MergedLinear(build, parts, hidden, bias)
        self.down = InputSplitLinear(build, "down_proj", hidden, intermediate, bias)
        self.fused = build.fused

    def targets(self, prefix: str) -> Iterator[Target]:
        """Yield where the checkpoint's tensors under `prefix` go."""
        yield from self.gate_up.targets(prefix)
        yield from self.down.targets(prefix)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [tokens, hidden] to [tokens, hidden]."""
        if self.fused:
            from mizzen.kernels.activation import silu_mul

            return self.down(silu_mul(self.gate_up(x)))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))
