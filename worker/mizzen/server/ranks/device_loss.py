# SPDX-License-Identifier: Apache-2.0
"""Recognize failures that mean that the device is lost, so that a restart on the same device does not help.

The supervisor checks the failure message of a rank. Faults that a restart cures, such as an illegal memory
access, are not recognized.
"""

from __future__ import annotations

LOST_DEVICE_ERRORS = (
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "hardware stack error",
    "devices unavailable",
    "device(s) is/are busy or unavailable",
    "no cuda-capable device is detected",
    "no cuda gpus are available",
    "gpu is lost",
    "fallen off the bus",
    "cuda error: unknown error",
)
"""Parts of failure messages, in lower case: those of cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable,
cudaErrorHardwareStackError, cudaErrorDevicesUnavailable, cudaErrorNoDevice and cudaErrorUnknown, and those of
PyTorch and NVML for the same errors."""


def is_device_lost(message: str) -> bool:
    """Return whether a failure message means that the device is gone or broken."""
    lowered = message.lower()
    return any(error in lowered for error in LOST_DEVICE_ERRORS)
