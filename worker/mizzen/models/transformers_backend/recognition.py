# SPDX-License-Identifier: Apache-2.0
"""Recognises modules of Transformers that compute the same as layers of Mizzen.

A module is recognised by its result: it runs on random numbers, and the result must equal the formula.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mizzen.layers.activation import FUNCTIONS
from mizzen.models.block import Activation

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""Names of the attribute that holds the epsilon of an RMSNorm."""
LARGE = 100.0
"""Factor of a second input, with which a block that clamps its gate differs from one that does not."""
ROTATE = "apply_rotary_pos_emb"
"""Name of the function that rotates queries and keys, in the modules of Transformers."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return seeded random numbers, float32, on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")


def equal(actual: Any, expected: torch.Tensor) -> bool:
    """Return whether a result is a tensor that equals the expected one, but for rounding in float32."""
    return (
        isinstance(actual, torch.Tensor)
        and actual.shape == expected.shape
        and actual.dtype == expected.dtype
        and torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)
    )


def succeeds(compute: Callable[[], Any]) -> Any:
    """Return the result of a function, or None if it fails in any way."""
    try:
        with torch.inference_mode():
            return compute()
    except Exception:  # an unknown module may fail in any way
        return None


def read_epsilon(module: nn.Module) -> Any:
    """Return the first of a module's attributes `EPSILONS`; None if it has none of them."""
    return next((getattr(module, name) for name in EPSILONS if hasattr(module, name)), None)


def recognise_norm(module: nn.Module) -> tuple[float, bool] | None:
    """Return the epsilon of an RMSNorm, and whether it multiplies by 1 + weight; None for other modules."""
    epsilon, parameters = read_epsilon(module), dict(module.named_parameters())
    if "RMSNorm" not in type(module).__name__ or list(parameters) != ["weight"] or list(module.buffers()):
        return None
    if not isinstance(epsilon, float) or parameters["weight"].dim() != 1:
        return None
    size = parameters["weight"].numel()
    weight = random(size, seed=1)
    x = torch.cat((random(1, 2, size, seed=2), random(1, 2, size) * 1e-3), dim=1)
    twin = copy.copy(module)
    twin._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    actual = succeeds(lambda: twin(x))
    for plus_one in (False, True):
        if equal(actual, F.rms_norm(x, (size,), weight + 1 if plus_one else weight, epsilon)):
            return epsilon, plus_one
    return None


def recognise_mlp(module: nn.Module) -> Activation | None:
    """Return the activation of a feed-forward block down(activation(gate(x)) * up(x)); None for others."""
    linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    if set(linears) != {GATE, UP, DOWN} or any(type(linear) is not nn.Linear for linear in linears.values()):
        return None
    others = (child for child in module.children() if child not in linears.values())
    if any(next(child.parameters(), None) is not None for child in others):
        return None
    if linears[GATE].weight.shape != linears[UP].weight.shape or module._parameters:
        return None
    if (linears[GATE].bias is None) != (linears[UP].bias is None):
        return None
    gate, up, down, x = random(6, 4, seed=1), random(6, 4, seed=2), random(4, 6, seed=3), random(1, 3, 4)
    twin = copy.copy(module)
    twin._modules = {
        **module._modules,
        GATE: small_linear(gate),
        UP: small_linear(up),
        DOWN: small_linear(down),
    }
    inputs = (x, LARGE * x)
    results = [succeeds(lambda x=x: twin(x)) for x in inputs]
    if any(not isinstance(result, torch.Tensor) for result in results):
        return None
    for kind in (Activation.SILU, Activation.GELU, Activation.GELU_TANH):
        expected = [F.linear(FUNCTIONS[kind](F.linear(x, gate)) * F.linear(x, up), down) for x in inputs]
        if equal(results[0], expected[0]) and equal(results[1] / LARGE**2, expected[1] / LARGE**2):
            return kind
    return None


def small_linear(weight: torch.Tensor) -> nn.Linear:
    """Return a linear layer without bias that has a weight [rows, columns]."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def recognise_rotation(forward: Any) -> Any:
    """Return the function with which a forward method rotates queries and keys, if it is RoPE; else None.

    It is recognised as RoPE if it rotates element i with element i + d / 2 of each head, and cos and
    sin [1, tokens, d] hold each of the angles twice.
    """
    code = getattr(forward, "__code__", None)
    if code is None or ROTATE not in code.co_names:
        return None
    function = forward.__globals__.get(ROTATE)
    q, k, angles = random(1, 2, 5, 8, seed=1), random(1, 1, 5, 8, seed=2), random(1, 5, 4, seed=3)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    result = succeeds(lambda: function(q, k, cos, sin))
    if not isinstance(result, tuple) or len(result) != 2:
        return None
    rotated = (rotate_halves(x, cos[:, None], sin[:, None]) for x in (q, k))
    is_rope = all(equal(actual, expected) for actual, expected in zip(result, rotated, strict=True))
    return function if is_rope else None


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [..., d] by angles whose cosines and sines are [..., d]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
