"""Recognize failures that mean that the device is lost, so that only another device helps, not a restart.

The supervisor checks the failure message of a rank. Messages of faults that a restart cures, such as an
illegal memory access, do not match.
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
"""Messages of cudaErrorECCUncorrectable, NvlinkUncorrectable, HardwareStackError, DevicesUnavailable,
NoDevice and Unknown, and the messages of PyTorch and NVML for the same errors; lower case."""


def is_device_lost(message: str) -> bool:
    """Return whether a failure message means that the device is gone or broken."""
    lowered = message.lower()
    return any(error in lowered for error in LOST_DEVICE_ERRORS)
