# SPDX-License-Identifier: Apache-2.0
"""Activation functions of feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from mizzen.layers.context import BuildContext
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.block import Activation, BlockConfig


def relu2(x: torch.Tensor) -> torch.Tensor:
    """Return the square of ReLU(x) (arXiv 2109.08668)."""
    return F.relu(x).square_()


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Return GELU(x) in its sigmoid approximation (arXiv 1606.08415)."""
    return x * torch.sigmoid(1.702 * x)


FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.QUICK_GELU: quick_gelu,
    Activation.RELU2: relu2,
}
"""Activation functions without parameters."""


class ActivationFunction:
    """An activation function, alone or multiplied by the up projection of a block with a gate."""

    def __init__(self, build: BuildContext, kind: Activation) -> None:
        self.kind = kind
        self.function = FUNCTIONS[kind]
        self.fused = build.fused

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the function's learned parameters; most functions have none."""
        return iter(())

    def finish(self) -> None:
        """Compute constants from the loaded parameters."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the function of x as a new tensor."""
        return self.function(x)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return activation(gate) * up, [tokens, size], for gate and up together, [tokens, 2 * size]."""
        if self.fused and self.kind in (Activation.SILU, Activation.GELU_TANH):
            from mizzen.kernels.swiglu import gate_mul

            return gate_mul(gate_up, tanh=self.kind is Activation.GELU_TANH)
        gate, up = gate_up.chunk(2, dim=-1)
        return self(gate).mul_(up)


class ClampedSwiGLU(ActivationFunction):
    """The gate of gpt-oss: g * sigmoid(slope * g) * (u + 1), with clamped g and u."""

    def __init__(self, limit: float, slope: float) -> None:
        self.kind = Activation.CLAMPED_SWIGLU
        self.fused = False
        self.limit, self.slope = limit, slope

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the function of the gate alone, as a new tensor."""
        x = x.clamp(max=self.limit)
        return x * torch.sigmoid(self.slope * x)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return the gated product [tokens, size] for gate and up together, [tokens, 2 * size]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self(gate).mul_(up.clamp(-self.limit, self.limit).add_(1))


class XIELU(ActivationFunction):
    """xIELU (arXiv 2411.13010), as Apertus uses it: its slopes are learned for each layer.

    For x > 0 it is alpha_p * x^2 + beta * x, and otherwise alpha_n * (exp(min(x, eps)) - 1 - x) + beta * x.
    """

    def __init__(self, build: BuildContext, prefix: str) -> None:
        self.kind = Activation.XIELU
        self.fused = False
        self.prefix = prefix
        self.parameters = {name: build.allocate(1) for name in ("alpha_p", "alpha_n")} | {
            name: build.allocate() for name in ("beta", "eps")
        }
        self.alpha_p = self.alpha_n = self.beta = self.epsilon = 0.0

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the learned parameters."""
        for name, parameter in self.parameters.items():
            yield WeightTarget(
                name=f"{self.prefix}.{name}",
                shape=tuple(parameter.shape),
                shard=tuple(slice(0, size) for size in parameter.shape),
                destination=parameter,
                fill=0.5,
            )

    def finish(self) -> None:
        """Compute the slopes, which the checkpoint stores as inputs of softplus."""
        values = {name: parameter.float().item() for name, parameter in self.parameters.items()}
        softplus = {name: F.softplus(torch.tensor(values[name])).item() for name in ("alpha_p", "alpha_n")}
        self.beta, self.epsilon = values["beta"], values["eps"]
        self.alpha_p, self.alpha_n = softplus["alpha_p"], self.beta + softplus["alpha_n"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the function of x as a new tensor."""
        positive = self.alpha_p * x * x + self.beta * x
        negative = (torch.expm1(x.clamp(max=self.epsilon)) - x) * self.alpha_n + self.beta * x
        return torch.where(x > 0, positive, negative)


def make_activation(build: BuildContext, block: BlockConfig, prefix: str) -> ActivationFunction:
    """Make the activation function of a feed-forward block whose tensor names begin with `prefix`.

    Raises:
        ValueError: the activation needs a gate, and the block has none.
    """
    match block.activation:
        case Activation.XIELU:
            return XIELU(build, prefix + "act_fn")
        case Activation.CLAMPED_SWIGLU:
            if not block.has_gate:
                raise ValueError("the activation clamped_swiglu needs a gate projection")
            return ClampedSwiGLU(block.gate_limit, block.gate_slope)
        case kind:
            return ActivationFunction(build, kind)
