# SPDX-License-Identifier: Apache-2.0
"""Checks of a GPU's generation, and launch options of Triton kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def is_hopper_or_later(device: torch.device) -> bool:
    """Return whether a device is a GPU of the Hopper generation or later, which the CUDA kernels need."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Return whether a GPU has the warpgroup MMA instruction (`wgmma`), which only Hopper has."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def count_multiprocessors(device: torch.device) -> int:
    """Return the number of SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def pdl_launch_options(x: torch.Tensor) -> dict[str, Any]:
    """Return the Triton launch options for programmatic dependent launch (PDL), if the GPU of x supports it.

    A kernel with PDL=True may start before the previous kernel ends, so it must call `gdc_wait` before it
    reads or overwrites anything that earlier kernels write or read.
    """
    return {"PDL": True, "launch_pdl": True} if is_hopper_or_later(x.device) else {"PDL": False}
