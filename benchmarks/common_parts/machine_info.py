# SPDX-License-Identifier: Apache-2.0
"""Description of the machine of a benchmark: GPU, driver, versions, commit and clocks.

The functions do not raise, but return None for an unknown value. They never initialize CUDA, because that
would create a context that the measured engine does not expect; they query the GPU through NVML.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def nvml(device: str) -> tuple[Any, Any] | None:
    """Return the NVML module and NVML's handle of the first visible GPU; None without a GPU or NVML."""
    if device != "cuda":
        return None
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
        if first.startswith("GPU-"):
            return pynvml, pynvml.nvmlDeviceGetHandleByUUID(first)
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(first or 0))
    return None


def text(value: str | bytes) -> str:
    """Return a string from NVML as text; older versions of NVML return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def gpu_name(device: str) -> str | None:
    """Return the name of the first GPU.

    Without NVML, the name is unknown (None) until this process has initialized CUDA.
    """
    handle = nvml(device)
    with suppress(Exception):
        if handle is not None:
            return text(handle[0].nvmlDeviceGetName(handle[1]))
        if device == "cuda" and torch.cuda.is_initialized():
            return torch.cuda.get_device_name()
    return None


def driver(device: str) -> str | None:
    """Return the version of the GPU driver."""
    handle = nvml(device)
    with suppress(Exception):
        return None if handle is None else text(handle[0].nvmlSystemGetDriverVersion())
    return None


def sm_clock(device: str) -> int | None:
    """Return the current SM clock of the first GPU in MHz."""
    handle = nvml(device)
    with suppress(Exception):
        return (
            None if handle is None else int(handle[0].nvmlDeviceGetClockInfo(handle[1], 1))
        )  # 1 is NVML_CLOCK_SM
    return None


def commit() -> str | None:
    """Return the Git commit of this checkout, with `-dirty` if there are uncommitted changes."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(Exception):
        folder = Path(__file__).parent
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip() or None
    return None


def machine(device: str, before: int | None = None) -> dict[str, Any]:
    """Return a description of the machine; `before` is the SM clock in MHz before the measurement."""
    return {
        "gpu": gpu_name(device),
        "driver": driver(device),
        "cuda": torch.version.cuda if device == "cuda" else None,
        "torch": str(torch.__version__),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "sm_clock_mhz": {"before": before, "after": sm_clock(device)},
    }


def headline(device: str, clock: int | None) -> str:
    """Return the suffix of a table's title: the GPU and its clock in MHz, as far as they are known."""
    name = gpu_name(device)
    speed = f"SM clock {clock} MHz" if clock is not None else None
    return "".join(f", {part}" for part in (name, speed) if part)
