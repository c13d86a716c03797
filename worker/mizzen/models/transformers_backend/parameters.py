"""Allocates the parameters and buffers that stay in a Transformers model, and names their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mizzen.layers.context import BuildContext
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.transformers_backend.build import persistent_buffers


def allocate_parameters(build: BuildContext, model: Any) -> Iterator[WeightTarget]:
    """Move a model from the meta device to that of the engine, and yield the destinations of its tensors.

    Buffers keep their values. Modules of Mizzen, which hold no torch parameters, are left alone.
    """
    allocated: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            known = id(parameter) in allocated
            if not known:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=build.device)
                allocated[id(parameter)] = nn.Parameter(empty, requires_grad=False)
            module._parameters[name] = own = allocated[id(parameter)]
            if not known:
                full = f"{prefix}.{name}" if prefix else name
                yield whole_target(full, own.data, dummy_value(module, name, own))
    for name, buffer in move_buffers(build.device, model):
        if buffer.is_floating_point():
            yield whole_target(name, buffer, 0.0)


def move_buffers(device: torch.device, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Move all buffers of a model to a device; yield the names and new tensors of those in checkpoints."""
    saved = set(persistent_buffers(model))
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            module._buffers[name] = moved = buffer.to(device)
            full = f"{prefix}.{name}" if prefix else name
            if full in saved:
                yield full, moved


def whole_target(name: str, destination: torch.Tensor, fill: float | None) -> WeightTarget:
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
