# SPDX-License-Identifier: Apache-2.0
"""Requirements of attention backends, and errors that say which requirement is not met."""

from __future__ import annotations

import torch

from mizzen.attention.base import KVFormat


def unsupported_error(name: str, reason: str) -> ValueError:
    """Return the error for an unsupported backend; the message starts with `name`, e.g. "attention fa3"."""
    return ValueError(f"{name} does not run here: {reason}; choose reference or auto")


def find_unmet_requirement(
    kv: KVFormat,
    head_dim: int,
    *,
    min_capability: int | None = None,
    hopper: bool = False,
    dtypes: tuple[torch.dtype, ...],
    dtype_names: str,
    head_dims: tuple[int, ...] | None = None,
) -> str | None:
    """Return the first requirement that a KV cache or its GPU does not meet; None if all are met.

    Args:
        kv: Format of the KV cache.
        head_dim: Head dim of the model.
        min_capability: Minimum major compute capability of the GPU; None for any device.
        hopper: Whether the GPU must be a Hopper GPU.
        dtypes: Supported dtypes of the cache.
        dtype_names: Names of these dtypes, for the message.
        head_dims: Supported head dims; None if the caller checks them.
    """
    device = kv.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if min_capability is not None and capability[0] < min_capability:
        return f"it needs an NVIDIA GPU of compute capability {min_capability}.0 or above"
    if hopper and capability != (9, 0):
        return "it needs a Hopper GPU"
    if kv.dtype not in dtypes:
        return f"it needs {dtype_names}, not {str(kv.dtype).removeprefix('torch.')}"
    if head_dims is not None and head_dim not in head_dims:
        return f"head_dim must be one of {head_dims}, not {head_dim}"
    return None
