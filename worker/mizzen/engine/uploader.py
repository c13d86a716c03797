"""Host-to-device copies that do not wait: single arrays, arrays packed together, and mirrored arrays.

Everything that keeps per-slot state on the host and reads it on the device uses it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 16
"""Bytes. Triton compiles a kernel for operands that begin at a multiple of this, and another for the rest."""


class Uploader:
    """Copies small host arrays to the device without waiting."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, array: NDArray[Any]) -> torch.Tensor:
        """Return a copy on the device; on CPU, a tensor that shares the array's memory.

        Pinned memory comes from PyTorch's caching allocator, which reuses it only after the copy.
        """
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def upload_together(self, *arrays: NDArray[Any]) -> tuple[torch.Tensor, ...]:
        """Return device copies of arrays of equal length, in their common dtype, sent in one copy.

        Each begins at a multiple of ALIGNMENT, whatever the length: otherwise another kernel variant would be
        compiled while all streams wait.
        """
        dtype, length = np.result_type(*arrays), len(arrays[0])
        aligned_length = ALIGNMENT // dtype.itemsize
        packed = np.zeros((len(arrays), -(-length // aligned_length) * aligned_length), dtype)
        packed[:, :length] = arrays
        return tuple(self(packed)[:, :length].unbind())


class MirroredArray:
    """An array with one row per slot, on the host and on the device; on CPU both share memory."""

    def __init__(self, values: NDArray[Any], upload: Uploader) -> None:
        self.host = values
        self.upload = upload
        self.shared = upload.device.type == "cpu"
        self.device = torch.from_numpy(values).to(upload.device)

    def write(self, index: tuple[NDArray[Any], ...], values: NDArray[Any]) -> None:
        """Set cells by index arrays, one per dimension; the last of several writes to a cell wins."""
        self.host[index] = values
        if not self.shared:
            device_index = tuple(self.upload(part.astype(np.int64)) for part in index)
            # Read back: the device does not order several writes to one cell.
            self.device[device_index] = self.upload(self.host[index])
