# SPDX-License-Identifier: Apache-2.0
"""Allocates the parameters and buffers that stay in a Transformers model, and names their tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mizzen.layers.context import BuildContext
from mizzen.layers.weight_target import DummyFill, WeightTarget


def allocate_parameters(build: BuildContext, model: Any) -> Iterator[WeightTarget]:
    """Move a model from the meta device to that of the engine, and yield the destinations of its tensors.

    Buffers keep their values. Modules of Mizzen, which hold no torch parameters, are left alone.
    """
    allocated: dict[int, nn.Parameter] = {}
    kept: list[torch.Tensor] = []  # keeps the ids unique
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in allocated:  # the module shares it with another one
                module._parameters[name] = allocated[id(parameter)]
                continue
            full = f"{prefix}.{name}" if prefix else name
            dtype = torch.float32 if keeps_float32(model, full, build.dtype) else parameter.dtype
            empty = torch.empty(parameter.shape, dtype=dtype, device=build.device)
            own = nn.Parameter(empty, requires_grad=False)
            module._parameters[name] = allocated[id(parameter)] = own
            kept.append(parameter)
            yield whole_target(full, own.data, dummy_value(module, name, own))
    for name, buffer in move_buffers(build, model):
        if buffer.is_floating_point():
            yield whole_target(name, buffer, 0.0)


def keeps_float32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Return whether Transformers keeps a tensor of a model in float32.

    Args:
        model: Causal language model.
        name: Name of the tensor or module.
        dtype: Data type of the other tensors.
    """
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return any(re.search(rf"(?:^|\.){re.escape(part)}(?:$|\.)", name) for part in kept)


def move_buffers(build: BuildContext, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Move all buffers of a model to the engine's device; yield names and tensors of those in checkpoints."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            full = f"{prefix}.{name}" if prefix else name
            moved = buffer.to(build.device)
            if keeps_float32(model, full, build.dtype):
                moved = moved.float()
            module._buffers[name] = moved
            if name not in module._non_persistent_buffers_set:
                yield full, moved


def whole_target(name: str, destination: torch.Tensor, fill: float | DummyFill | None) -> WeightTarget:
    """Return the target of a tensor that every rank holds completely."""
    shape = tuple(destination.shape)
    return WeightTarget(
        name=name,
        shape=shape,
        shard=tuple(slice(0, size) for size in shape),
        destination=destination,
        fill=fill,
    )


def dummy_value(module: nn.Module, name: str, parameter: torch.Tensor) -> float | None:
    """Return the value of all elements of a dummy parameter; None for random values."""
    if parameter.dim() > 1:
        return None
    return 1.0 if name == "weight" and not isinstance(module, nn.Linear) else 0.0
