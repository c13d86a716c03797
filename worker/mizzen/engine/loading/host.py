# SPDX-License-Identifier: Apache-2.0
"""Determines how many CPUs and how much host and GPU memory this process may use.

The limits of its container are respected. The loader derives the sizes of thread pools and of the KV cache
from these numbers.
"""

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
"""Folder with the cgroup limits of the container."""
MEMINFO = Path("/proc/meminfo")
"""File in which Linux reports the memory of the machine."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Total and free memory of a device or machine, in bytes."""

    total: int
    free: int


def read_first_number(path: Path) -> int | None:
    """Return the number at the start of a file; None if there is no file, or no number (such as "max")."""
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def cpu_count(cgroup: Path = CGROUP) -> int:
    """Return the number of CPUs that the process's affinity and its container's quota let it use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        count = min(count, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        pass  # no quota
    return count


def host_memory(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> DeviceMemory:
    """Return the memory of the machine, or of the container if that has less; file caches count as free."""
    lines = (line.split() for line in meminfo.read_text().splitlines())
    fields = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    total, free = fields["MemTotal"], fields["MemAvailable"]
    limit, used = read_first_number(cgroup / "memory.max"), read_first_number(cgroup / "memory.current")
    if limit is not None and used is not None and limit < total:
        total, free = limit, min(free, limit - used + reclaimable_file_bytes(cgroup))
    return DeviceMemory(total, free)


def reclaimable_file_bytes(cgroup: Path) -> int:
    """Return the bytes of cached files that the kernel can reclaim from a container at once."""
    try:
        rows = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return int(dict(rows)["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the memory of the model's device; memory that PyTorch caches without using it counts as free."""
    if device.type == "cpu":
        return host_memory()
    free, total = torch.cuda.mem_get_info(device)
    # Memory that PyTorch caches without using it is free for this process.
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return DeviceMemory(total, free + idle)


def reported_device_memory(device: torch.device) -> DeviceMemory:
    """Return the memory of a device as the driver reports it; PyTorch's unused cache counts as used."""
    if device.type == "cpu":
        return host_memory()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free)


def measure_allocation(device: torch.device, make: Callable[[], T]) -> tuple[T, int]:
    """Call `make`; return its result, and the bytes of GPU memory that it allocated (0 on CPU).

    PyTorch's unused cache is released before and after the call. Memory that other processes allocate or free
    on the GPU meanwhile distorts the number, which is never below 0.
    """
    if device.type == "cpu":
        return make(), 0
    torch.cuda.empty_cache()
    before = reported_device_memory(device).free
    result = make()
    torch.cuda.empty_cache()
    return result, max(0, before - reported_device_memory(device).free)
