# SPDX-License-Identifier: Apache-2.0
"""Moves the rotation of queries and keys (RoPE) from attention modules into their paged attention.

There it is one kernel together with the KV write, or part of the attention kernel.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from mizzen.models.transformers_backend import recognition
from mizzen.models.transformers_backend.attention import AttentionInputs
from mizzen.models.transformers_backend.meta_run import run_on_meta


class RotationReceiver(Protocol):
    """Object that applies a rotation later."""

    def defer_rotation(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep a rotation of q and k [1, heads, tokens, d]; return q and k unchanged."""
        ...


def defer_rotation(module: nn.Module, receiver: RotationReceiver) -> bool:
    """Let a receiver apply the rotation of an attention module's queries and keys, instead of the module.

    The module gets a copy of its forward method in which the rotation is replaced; its class is unchanged.

    Returns:
        Whether the module's rotation is RoPE, and was replaced.
    """
    forward = type(module).forward
    original = recognition.recognise_rotation(forward)
    if original is None:
        return False

    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **options: Any) -> Any:
        if options or cos.dim() != 3 or len(cos) != 1 or cos.shape[-1] != q.shape[-1]:
            return original(q, k, cos, sin, **options)
        return receiver.defer_rotation(q, k, cos, sin)

    names = {**forward.__globals__, recognition.ROTATE: rotate}
    copied = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    module.forward = types.MethodType(copied, module)
    return True


def restore_rotation(module: nn.Module) -> None:
    """Restore the forward method that the class of a module defines."""
    module.__dict__.pop("forward", None)


class IdentityCheck:
    """Checks in a run that each layer passes the rotated queries and keys straight to its attention."""

    def __init__(self) -> None:
        self.rotated: tuple[torch.Tensor, torch.Tensor] | None = None
        self.holds = True

    def defer_rotation(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Remember the tensors."""
        self.rotated = (q, k)
        return q, k

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        """Compare the tensors of an attention call; return a result [1, tokens, heads, d]."""
        rotated, self.rotated = self.rotated, None
        self.holds &= rotated is not None and rotated[0] is inputs.query and rotated[1] is inputs.key
        return inputs.query.transpose(1, 2)


def can_defer_rotation(model: Any, modules: Sequence[nn.Module]) -> bool:
    """Return whether all attention modules of a model on the meta device may leave RoPE to the attention."""
    check = IdentityCheck()
    try:
        if not all(defer_rotation(module, check) for module in modules):
            return False
        run_on_meta(model, check)
        return check.holds
    finally:
        for module in modules:
            restore_rotation(module)
