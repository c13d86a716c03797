# SPDX-License-Identifier: Apache-2.0
"""The description of a benchmark's machine: unknown values are left out, and no GPU is initialized for it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from common_parts.machine_info import commit, driver, gpu_name, headline, machine, sm_clock


def fake(**changes: object) -> ModuleType:
    """Return a fake NVML module with one GPU; like old versions of NVML, it returns bytes instead of str."""

    def by_index(index: int) -> str:
        return f"handle {index}"

    calls = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: f"handle {uuid}",
        "nvmlDeviceGetName": lambda handle: f"GPU of {handle}",
        "nvmlSystemGetDriverVersion": lambda: b"580.1",
        "nvmlDeviceGetClockInfo": lambda handle, kind: 1980 + kind,
    }
    return SimpleNamespace(**{**calls, **changes})  # pyright: ignore[reportReturnType]


def test_a_gpu_has_a_name_a_driver_and_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    description = machine("cuda", 345)
    assert (description["gpu"], description["driver"]) == ("GPU of handle 0", "580.1")
    assert description["sm_clock_mhz"] == {"before": 345, "after": 1981}
    assert headline("cuda", 345) == ", GPU of handle 0, SM clock 345 MHz"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert gpu_name("cuda") == "GPU of handle 3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-12ab")
    assert gpu_name("cuda") == "GPU of handle GPU-12ab"


def broken(*_: object) -> None:
    raise RuntimeError("no such thing")


@pytest.mark.parametrize(
    "library", [None, fake(nvmlInit=broken), fake(nvmlDeviceGetName=broken, nvmlDeviceGetClockInfo=broken)]
)
def test_unknown_values_become_none(monkeypatch: pytest.MonkeyPatch, library: ModuleType | None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert gpu_name("cuda") is sm_clock("cuda") is None
    assert headline("cuda", None) == ""
    assert machine("cuda")["sm_clock_mhz"] == {"before": None, "after": None}


def test_without_nvml_only_a_gpu_in_use_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    assert gpu_name("cuda") is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert gpu_name("cuda") == "GPU"
    assert gpu_name("cpu") is None


def test_a_cpu_has_no_gpu_and_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake())
    description = machine("cpu")
    assert description["gpu"] is description["driver"] is description["cuda"] is driver("cpu") is None
    assert headline("cpu", sm_clock("cpu")) == ""
    assert description["date"].endswith("+00:00")


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit() is None
