"""What this process may use of its machine: processors and memory, within the limits of its container."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory, in bytes."""

    total: int
    free: int


def read_word(path: Path) -> int | None:
    """Read a number from a file's first word; None when there is no file or no number ("max")."""
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def cpu_count(cgroup: Path = CGROUP) -> int:
    """Return the processors of this process: its affinity, capped by the container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        count = min(count, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        pass  # no quota
    return count


def host_memory(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> DeviceMemory:
    """Return the machine's memory, or the container's where it is less; caches of files count as free."""
    lines = (line.split() for line in meminfo.read_text().splitlines())
    fields = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    total, free = fields["MemTotal"], fields["MemAvailable"]
    limit, used = read_word(cgroup / "memory.max"), read_word(cgroup / "memory.current")
    if limit is not None and used is not None and limit < total:
        total, free = limit, min(free, limit - used + inactive_files(cgroup))
    return DeviceMemory(total, free)


def inactive_files(cgroup: Path) -> int:
    """Return the bytes of cached files that a container would give back at once."""
    try:
        rows = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return int(dict(rows)["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the memory of the device that the model runs on."""
    if device.type == "cpu":
        return host_memory()
    free, total = torch.cuda.mem_get_info(device)
    # What PyTorch holds without using it is free to us.
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return DeviceMemory(total, free + idle)


def held_memory(device: torch.device) -> DeviceMemory:
    """Return the device's memory as it says itself: what PyTorch holds without using it is not free."""
    if device.type == "cpu":
        return host_memory()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free)


def taken_by(device: torch.device, make: Callable[[], T]) -> tuple[T, int]:
    """Make what stays on a device; return it with the bytes that it took of a GPU, 0 on cpu.

    What PyTorch holds without using it is given back before and after. Other processes that share the GPU
    may give back more meanwhile than was taken; then nothing is told.
    """
    if device.type == "cpu":
        return make(), 0
    torch.cuda.empty_cache()
    before = held_memory(device).free
    made = make()
    torch.cuda.empty_cache()
    return made, max(0, before - held_memory(device).free)
