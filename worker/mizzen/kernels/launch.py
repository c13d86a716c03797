"""How kernels are launched on a device."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def hopper(device: torch.device) -> bool:
    """Tell whether a device is a GPU of the generation that kernels of ours are for, or a later one."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Tell whether a GPU multiplies by groups of warps (`wgmma`), which Hopper alone does."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def pdl_launch_options(x: torch.Tensor) -> dict[str, Any]:
    """Return launch options with which a kernel begins before the one ahead of it ends, where that is served.

    Programmatic dependent launch: the kernel gets PDL=True, and has to wait before it reads or writes what
    others write.
    """
    return {"PDL": True, "launch_pdl": True} if hopper(x.device) else {"PDL": False}
