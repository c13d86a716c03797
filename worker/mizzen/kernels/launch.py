"""GPU generations and launch options of Triton kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def is_hopper_or_later(device: torch.device) -> bool:
    """Return whether a device is a Hopper GPU or a later one, for which the CUDA kernels are written."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Return whether a GPU has the warpgroup MMA instruction (`wgmma`), which only Hopper has."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def pdl_launch_options(x: torch.Tensor) -> dict[str, Any]:
    """Return the Triton launch options for programmatic dependent launch (PDL), if x's device supports it.

    A kernel launched with PDL=True starts before the previous one ends; it must wait before it reads or
    writes data of other kernels.
    """
    return {"PDL": True, "launch_pdl": True} if is_hopper_or_later(x.device) else {"PDL": False}
