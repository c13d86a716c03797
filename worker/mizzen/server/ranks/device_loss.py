"""Whether a failure means that the device is lost: no restart in the same pod helps, another device does.

A rank says in words why it ends. Those of faults that a restart cures, such as an illegal access, are not
among the words that count.
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
"""Of cudaErrorECCUncorrectable, NvlinkUncorrectable, HardwareStackError, DevicesUnavailable, NoDevice and
Unknown, and what PyTorch and NVML say of the same."""


def is_device_lost(message: str) -> bool:
    """Tell whether the words of a failure are those of a device that is gone or broken."""
    lowered = message.lower()
    return any(error in lowered for error in LOST_DEVICE_ERRORS)
