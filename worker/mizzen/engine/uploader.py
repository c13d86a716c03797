# SPDX-License-Identifier: Apache-2.0
"""Asynchronous host-to-device copies of arrays, and arrays that exist on both host and device.

Sampling, slot state and graphs use them for per-slot state that the host writes and the device reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 16
"""Alignment in bytes; Triton compiles separate kernel variants for operands with and without it."""


class Uploader:
    """Copies small host arrays to the device without waiting for the copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, array: NDArray[Any]) -> torch.Tensor:
        """Copy an array to the device; on CPU, return a tensor that shares the array's memory.

        The copy goes through pinned memory of PyTorch's caching allocator, which does not reuse this memory
        before the copy is complete.
        """
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def upload_together(self, *arrays: NDArray[Any]) -> tuple[torch.Tensor, ...]:
        """Copy arrays [n] of equal length to the device at once, converted to their common dtype.

        Each result is aligned to ALIGNMENT bytes, for any n: otherwise Triton would compile another kernel
        variant while all streams wait.
        """
        dtype, length = np.result_type(*arrays), len(arrays[0])
        aligned_length = ALIGNMENT // dtype.itemsize
        packed = np.zeros((len(arrays), -(-length // aligned_length) * aligned_length), dtype)
        packed[:, :length] = arrays
        return tuple(self(packed)[:, :length].unbind())


class MirroredArray:
    """An array with one row per slot that exists on host and device; on CPU both share memory."""

    def __init__(self, values: NDArray[Any], upload: Uploader) -> None:
        self.host = values
        self.upload = upload
        self.shared = upload.device.type == "cpu"
        self.device = torch.from_numpy(values).to(upload.device)

    def write(self, index: tuple[NDArray[Any], ...], values: NDArray[Any]) -> None:
        """Set elements on host and device; if an element is written several times, the last value wins.

        Nothing is copied if all elements have these values already, as most sampling parameters do.

        Args:
            index: Integer arrays [n], one per indexed dimension.
            values: New values.
        """
        if np.array_equal(self.host[index], values):
            return
        self.host[index] = values
        if not self.shared:
            device_index = tuple(self.upload(part.astype(np.int64)) for part in index)
            # Send the values that the host array has now: the device does not order several writes to an
            # element.
            self.device[device_index] = self.upload(self.host[index])
