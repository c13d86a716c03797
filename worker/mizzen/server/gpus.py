# SPDX-License-Identifier: Apache-2.0
"""Find the NVIDIA GPUs that this process can use, within a second and without importing PyTorch."""

from __future__ import annotations

import ctypes
import importlib.metadata
from dataclasses import dataclass

DRIVER = "libcuda.so.1"
"""Library of NVIDIA's driver, which PyTorch loads by the same name."""


@dataclass(frozen=True, slots=True)
class GpuSearch:
    """Result of a search: the number of GPUs and, if no GPU is found, the reason."""

    count: int
    problem: str = ""


def find_gpus() -> GpuSearch:
    """Return how many GPUs the driver offers to this process; it respects `CUDA_VISIBLE_DEVICES`.

    The driver is initialized, which takes some time on machines with many GPUs.
    """
    if problem := find_problem():
        return GpuSearch(0, problem)
    driver, count = ctypes.CDLL(DRIVER), ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return GpuSearch(0, f"NVIDIA's driver reports {_error_name(driver, code)}")
    return GpuSearch(count.value, "" if count.value else "NVIDIA's driver reports 0 GPUs")


def find_problem() -> str:
    """Return why no GPU can be used, or an empty string if there is a driver and PyTorch supports CUDA.

    The driver is not initialized.
    """
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return f"{DRIVER} of NVIDIA's driver is missing"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return f"PyTorch {version} is installed without CUDA" if version.endswith("+cpu") else ""


def _error_name(driver: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    if driver.cuGetErrorName(code, ctypes.byref(name)) or not name.value:
        return f"error {code}"
    return name.value.decode(errors="replace")


def check_gpus(tensor: int, found: GpuSearch) -> None:
    """Check that there is a GPU for each rank on this machine.

    Raises:
        ValueError: there are too few GPUs; the message names the option and the alternatives.
    """
    if not found.count:
        raise ValueError(
            f"--device cuda finds no GPU here ({found.problem}): use --device cpu, or a machine with a GPU"
        )
    if found.count < tensor:
        raise ValueError(
            f"--tensor {tensor} needs as many GPUs, but this machine has {found.count}: lower it"
        )
