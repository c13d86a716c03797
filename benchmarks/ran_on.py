"""What a figure was measured on: GPU, driver, versions, commit and clocks.

Nothing here fails: what cannot be told is None. The GPU is asked through NVML alone, for asking CUDA would
make a context that the measured engine does not expect.
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
    """Return NVML and its handle of the first GPU that this process sees; None where there is none."""
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
    """Return what NVML says as text, which its older versions give as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def gpu_name(device: str) -> str | None:
    """Return the first GPU's name; without NVML it is known once this process uses the GPU."""
    found = nvml(device)
    with suppress(Exception):
        if found is not None:
            return text(found[0].nvmlDeviceGetName(found[1]))
        if device == "cuda" and torch.cuda.is_initialized():
            return torch.cuda.get_device_name()
    return None


def driver(device: str) -> str | None:
    """Return the version of the GPU's driver."""
    found = nvml(device)
    with suppress(Exception):
        return None if found is None else text(found[0].nvmlSystemGetDriverVersion())
    return None


def sm_clock(device: str) -> int | None:
    """Return the clock of the first GPU's multiprocessors in MHz, as it is now."""
    found = nvml(device)
    with suppress(Exception):
        return None if found is None else int(found[0].nvmlDeviceGetClockInfo(found[1], 1))  # 1: of the SMs
    return None


def commit() -> str | None:
    """Return the commit that this is a checkout of, with -dirty where something was changed since."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(Exception):
        folder = Path(__file__).parent
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip() or None
    return None


def machine(device: str, before: int | None = None) -> dict[str, Any]:
    """Return what a benchmark ran on; `before` is the clock that it began with."""
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
    """Return what stands behind a table's title: the GPU and its clock, as far as they are known."""
    name = gpu_name(device)
    speed = f"SM clock {clock} MHz" if clock is not None else None
    return "".join(f", {part}" for part in (name, speed) if part)
