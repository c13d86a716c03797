# SPDX-License-Identifier: Apache-2.0
"""The plan of the step that measures memory is the largest that the options allow, and can be executed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.execution.step import StepExecutor
from mizzen.engine.loading import memory_fit, model_setup
from mizzen.engine.loading.memory_need import MemoryNeed
from mizzen.engine.loading.memory_profile import build_largest_plan, measure_step_bytes
from mizzen.engine.sampling import sampler
from mizzen.engine.uploader import Uploader
from mizzen.models.registry import read_config


@given(
    slots=st.integers(1, 40),
    chunk=st.integers(1, 500),
    page=st.sampled_from((1, 4, 16)),
    context=st.integers(2, 300),
)
def test_the_largest_plan_has_the_most_tokens_and_samples(
    slots: int, chunk: int, page: int, context: int
) -> None:
    options = EngineOptions(model="m", max_running_requests=slots, prefill_chunk_tokens=chunk, page_size=page)
    plan = build_largest_plan(options, context)
    tokens = sum(len(prefill_chunk.tokens) for prefill_chunk in plan.prefill)
    assert tokens >= min(chunk + slots, slots * (context - 1))
    assert plan.samples == slots == len(plan.starts)
    assert len(np.unique(plan.pages.pages)) == len(plan.pages.pages)
    retained = np.bincount(plan.pages.slots, minlength=slots)
    assert (retained * page >= len(plan.prefill[0].tokens)).all()


def test_the_largest_plan_can_be_executed(
    kit: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.save_model(tmp_path, "qwen3")
    options = EngineOptions(
        model=str(tmp_path), device="cpu", max_running_requests=5, prefill_chunk_tokens=32, page_size=4
    )
    config, upload = read_config(tmp_path), Uploader(torch.device("cpu"))
    plan = build_largest_plan(options, 64)
    model = model_setup.make_model(options, config, lambda done, total: None)
    attention = model_setup.make_attention_with_kv(
        model, 4, len(plan.pages.pages), prefill="reference", decode="reference"
    )
    state = SlotState(5, 16, upload, vocab=config.vocab_size)
    sorted_weights: list[torch.Tensor] = []
    rank = sampler.sort_weights
    monkeypatch.setattr(
        sampler, "sort_weights", lambda *given: sorted_weights.append(rank(*given)) or sorted_weights[-1]
    )
    with torch.inference_mode():
        outcome = StepExecutor(model, attention, state, upload)(plan)
    assert outcome.tokens.shape == (5,)
    [weights] = sorted_weights
    assert weights.shape == (5, config.vocab_size), "all tokens are sorted, not only a few"
    assert outcome.side_outputs is not None
    # All prompt tokens except the first have logprobs, so there are many rows of logits for few requests.
    output = [
        logprobs
        for logprobs in outcome.side_outputs.logprobs
        if logprobs.requests[0].start_position is not None
    ]
    # One table for the request with many alternatives, and one for the four others.
    rows = len(plan.prefill[0].tokens) - 1
    assert [len(logprobs.packed) for logprobs in output] == [rows, 4 * rows]
    assert (state.lengths[:5] == len(plan.prefill[0].tokens)).all()


def test_step_bytes_are_the_peak_without_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of PyTorch's allocator statistics counts the bytes."""
    reserved = [1000]
    peaks: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[0])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: max(peaks))
    options = EngineOptions(model="m", max_running_requests=2, prefill_chunk_tokens=30, page_size=16)

    def make_step(pages: int) -> StepExecutor:
        assert pages == 2
        return lambda plan: peaks.append(reserved[0] + 3 * 100 + 77)  # type: ignore[return-value]

    plan = build_largest_plan(options, 1000)
    assert measure_step_bytes(make_step, plan, 100, torch.device("cuda")) == 77


def test_cpu_engines_and_several_ranks_use_the_memory_estimate(
    kit: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several ranks, step memory is not measured, because all ranks would have to run the step together.

    The memory of graphs is added to step memory, whether that is measured or estimated.
    """
    kit.save_model(tmp_path, "qwen3")
    monkeypatch.setattr(memory_fit, "measure_step_bytes", lambda *given: 500)
    options = EngineOptions(model="m", tensor=2)
    need = MemoryNeed.estimate(read_config(tmp_path), options, 2)

    def step_bytes(device: str, group: Any) -> int:
        return memory_fit.measure_need(options, 100, need, torch.device(device), group, Mock()).step_bytes

    assert step_bytes("cuda", None) == 500 + need.graph_bytes
    assert step_bytes("cuda", Mock()) == need.step_bytes + need.graph_bytes > need.step_bytes
    assert step_bytes("cpu", None) == need.step_bytes + need.graph_bytes


def test_measured_step_memory_replaces_the_estimate(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_model(tmp_path, "qwen3")
    config = read_config(tmp_path)
    graphs = MemoryNeed.estimate(config, EngineOptions(model="m"), 2)
    eager = MemoryNeed.estimate(config, EngineOptions(model="m", cuda_graph="off"), 2)
    assert eager.with_measured_step(500).step_bytes == 500
    assert graphs.with_measured_step(500).step_bytes == 500 + graphs.graph_bytes > 500
    assert graphs.token_bytes == graphs.with_measured_step(500).token_bytes
