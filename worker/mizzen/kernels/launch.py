"""How kernels are launched on a device."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def overlapped(x: torch.Tensor) -> dict[str, Any]:
    """Return launch options with which a kernel begins before the one ahead of it ends, where that is served.

    Programmatic dependent launch: the kernel gets PDL=True, and has to wait before it reads or writes what
    others write.
    """
    return {"PDL": True, "launch_pdl": True} if _hopper(x.device) else {"PDL": False}
