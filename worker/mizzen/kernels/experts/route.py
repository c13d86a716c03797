# SPDX-License-Identifier: Apache-2.0
"""Logits of a router and the choice of experts in one launch, for inputs and weights in bfloat16.

The choice is that of `mizzen.kernels.experts.router`, whose kernels do what this one does not support.
"""

from __future__ import annotations

import torch

from mizzen.kernels.experts.router import RoutingRules
from mizzen.kernels.launch import is_hopper_or_later
from mizzen.kernels.nvrtc import KernelSpec, can_compile, launch, load_kernel, read_source

SOURCE = read_source("experts/route")
WARPS = 16
CLUSTER = 8
"""Maximum number of blocks of a cluster, which share the experts."""
MAX_REGISTERS = 96
"""Maximum number of registers of a thread that hold weights and inputs."""
MAX_PER_TOKEN = 32
MAX_COUNT = 256
"""Maximum number of experts, whose logits a block keeps in shared memory."""
TOKENS = 8
"""Tokens of a block."""
MAX_TOKENS = 256
"""Maximum number of tokens. With 128 experts, a library GEMM and `choose_experts` take 7.8 us for 256 tokens
on an H100 and 8.0 us for 384, and this kernel 7.3 and 9.5 us."""


class RouterKernel:
    """The kernel for the weights and rules of one router."""

    def __init__(
        self,
        weight: torch.Tensor,
        rules: RoutingRules,
        held: slice,
        *,
        logit_bias: torch.Tensor | None = None,
        correction: torch.Tensor | None = None,
    ) -> None:
        """Keep a router's tensors.

        Args:
            weight: Weights, bfloat16 [experts, hidden]; `supports` must accept them.
            rules: How experts are chosen.
            held: Experts that this rank holds.
            logit_bias: Biases to add to the logits, float32 [experts].
            correction: Biases to add to the scores for the choice, float32 [experts].
        """
        self.weight, self.rules, self.held = weight, rules, held
        self.logit_bias, self.correction = logit_bias, correction
        self.m_tiles = -(-rules.count // (16 * CLUSTER))

    @staticmethod
    def supports(
        weight: torch.Tensor,
        rules: RoutingRules,
        logit_bias: torch.Tensor | None,
        correction: torch.Tensor | None,
    ) -> bool:
        """Return whether the kernel supports a router."""
        m_tiles, units = -(-rules.count // (16 * CLUSTER)), -(-weight.shape[1] // (32 * WARPS))
        return (
            is_hopper_or_later(weight.device)
            and weight.dtype == torch.bfloat16
            and weight.is_contiguous()
            and weight.shape[1] % 32 == 0
            and m_tiles * 16 * TOKENS <= 32 * WARPS
            and units * 4 * (2 * m_tiles + 1) <= MAX_REGISTERS
            and rules.groups == 1
            and rules.count <= MAX_COUNT
            and rules.per_token <= min(MAX_PER_TOKEN, rules.count)
            and (logit_bias is None or logit_bias.dtype == torch.float32)
            and (correction is None or correction.dtype == torch.float32)
        )

    def spec(self, *, has_live: bool) -> KernelSpec:
        """Return the spec of the kernel, for calls with or without padding rows."""
        rules = self.rules
        definitions = (
            ("COUNT", rules.count),
            ("HELD", self.held.stop - self.held.start),
            ("HIDDEN", self.weight.shape[1]),
            ("PER_TOKEN", rules.per_token),
            ("SOFTMAX", int(rules.softmax)),
            ("RENORMALIZE", int(rules.renormalize)),
            ("HAS_LOGIT_BIAS", int(self.logit_bias is not None)),
            ("HAS_CORRECTION", int(self.correction is not None)),
            ("HAS_LIVE", int(has_live)),
            ("M_TILES", self.m_tiles),
        )
        return SOURCE, "route", definitions

    def can_compile(self) -> bool:
        """Compile the kernel and return whether it can be used; if not, log a warning."""
        fallback = "experts are chosen by several kernels"
        return all(
            can_compile(*self.spec(has_live=has_live), self.weight.device, fallback)
            for has_live in (False, True)
        )

    def __call__(
        self, x: torch.Tensor, live: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of x, bfloat16 [tokens, hidden] and contiguous; see `choose_experts`.

        Raises:
            ValueError: There are more than `MAX_TOKENS` tokens.
        """
        tokens, rules, device = len(x), self.rules, x.device
        if tokens > MAX_TOKENS:
            raise ValueError(f"{tokens} tokens are more than {MAX_TOKENS}")
        blocks = -(-rules.count // (16 * self.m_tiles))
        chosen = torch.empty(tokens, rules.per_token, dtype=torch.int64, device=device)
        weights = torch.empty(tokens, rules.per_token, dtype=torch.float32, device=device)
        launch(
            load_kernel(*self.spec(has_live=live is not None), device.index or 0),
            (blocks, -(-tokens // TOKENS), 1),
            32 * WARPS,
            (
                x, self.weight, self.logit_bias, self.correction, live, chosen, weights,
                tokens, self.held.start, float(rules.sum_floor), float(rules.scale),
            ),
            cluster=(blocks, 1, 1),
        )  # fmt: skip
        return chosen, weights
