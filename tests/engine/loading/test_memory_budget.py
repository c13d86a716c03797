# SPDX-License-Identifier: Apache-2.0
"""The memory budget: KV pages that leave memory for steps, and advice if a GPU's memory is too small."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mizzen.engine.config import EngineOptions
from mizzen.engine.loading import model_setup
from mizzen.engine.loading.host import DeviceMemory, measure_allocation
from mizzen.engine.loading.loader import load_engine
from mizzen.engine.loading.memory_budget import GIB, MemoryShortage, fit_kv_pages, memory_shortage
from mizzen.engine.loading.memory_need import MemoryNeed

NEED = MemoryNeed(token_bytes=1 << 20, step_bytes=2 * GIB)
TOKENS = 8 << 10
"""Number of tokens whose KV cache takes 8 GiB."""


def pages(device: str, free: float) -> int:
    options = EngineOptions(model="m", device=device, kv_cache_tokens=TOKENS, page_size=16)
    return fit_kv_pages(options, 4096, NEED, DeviceMemory(80 * GIB, int(free * GIB)))


def test_kv_cache_tokens_must_leave_memory_for_steps_on_a_gpu() -> None:
    assert pages("cuda", 10.1) == pages("cpu", 8.1) == TOKENS // 16
    with pytest.raises(MemoryShortage, match=r"needs 8.00 GiB beside a step's 2.00 GiB, 9.50 GiB of 80.00"):
        pages("cuda", 9.5)
    with pytest.raises(MemoryShortage, match=r"needs 8.00 GiB, 7.90 GiB of 80.00 GiB are free: lower it"):
        pages("cpu", 7.9)


@pytest.mark.parametrize(
    ("phase", "advice"),
    [("weights", "--tensor"), ("kv", "--memory-fraction"), ("graphs", "--cuda-graph-max")],
)
def test_memory_errors_give_advice_by_phase(phase: str, advice: str) -> None:
    assert advice in str(memory_shortage(phase, RuntimeError("tried to allocate")))


def test_a_model_that_does_not_fit_raises_memory_shortage(
    kit: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.save_model(tmp_path, "qwen3")

    def full(*args: Any, **more: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    monkeypatch.setattr(model_setup, "load_checkpoint", full)
    with pytest.raises(MemoryShortage, match=r"too little memory \(weights\): take a larger GPU.*9.00 GiB"):
        load_engine(EngineOptions(model=str(tmp_path), device="cpu"))


def test_graph_memory_is_the_drop_in_free_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory cached by PyTorch does not count, because it is released before and after the capture."""
    device = {"free": 70, "idle": 10}

    def give_back() -> None:
        device["free"] += device.pop("idle", 0)

    def make() -> str:
        device["free"] -= 30
        device["idle"] = 5
        return "made"

    monkeypatch.setattr(torch.cuda, "empty_cache", give_back)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device_: (device["free"], 100))
    assert measure_allocation(torch.device("cuda"), make) == ("made", 25)
    assert measure_allocation(torch.device("cpu"), make) == ("made", 0)


def test_reported_memory_uses_add_up_to_the_memory_in_use(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_model(tmp_path, "qwen3")
    engine = load_engine(EngineOptions(model=str(tmp_path), device="cpu", kv_cache_tokens=256, threads=1))
    info = engine.info
    engine.close()
    parts_of = info.weights_bytes + info.kv_bytes + info.graph_bytes + info.other_bytes
    assert info.graph_bytes == 0 < info.other_bytes
    assert parts_of == info.device_bytes - info.free_bytes
