# SPDX-License-Identifier: Apache-2.0
"""Memory under load: a full KV cache never exhausts the GPU, and minutes of arrivals and aborts leak nothing.

MIZZEN_LOAD_SECONDS sets the total duration of the random load: 20 by default, 240 by `make test-gpu`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import grammar_kit as gk
import numpy as np
import psutil
import pytest
import torch
from common_parts.shapes import SHAPES
from random_load import KINDS, RandomLoad

from mizzen import LLM, SamplingParams
from mizzen.core.outputs import ExpertUse
from mizzen.core.request import FinishReason, Request
from mizzen.engine import expert_load

SECONDS = float(os.environ.get("MIZZEN_LOAD_SECONDS", "20"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(SECONDS + 300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 1 << 20
KV_DTYPES = ("auto", "fp8")
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}
"""Fields that turn the model into a mixture of experts."""


def save_shape(folder: Path, **changes: Any) -> None:
    """Save a model with the shape of Qwen3-0.6B but for `changes`, for dummy weights.

    Its first tokens are bytes, for grammars.
    """
    config = {**SHAPES["qwen3-0.6b"], "eos_token_id": gk.EOS, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    gk.save_tokenizer(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model without experts."""
    save_shape(tmp_path)
    return tmp_path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of experts that Triton compiles, in order."""
    from triton import knobs

    names: list[str] = []

    def record(*_: Any, fn: Any, **fields: Any) -> None:
        if fn.module.startswith("mizzen.kernels.experts"):
            names.append(fn.name)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", record)
    return names


@pytest.mark.parametrize("kv_cache_dtype", KV_DTYPES)
def test_random_load_with_aborts_leaks_nothing(folder: Path, kv_cache_dtype: str) -> None:
    run_random_load(folder, kv_cache_dtype, "off")


def test_random_load_of_a_mixture_drops_no_token_and_compiles_nothing(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_load, "READ_SECONDS", 1.0)
    save_shape(tmp_path, **MIXTURE)
    use = run_random_load(tmp_path, "auto", "on", started=compiled.clear)
    assert not compiled, "no kernel is compiled once the engine is ready"
    assert use is not None and use.dropped == 0
    assert len(use.ratios) == SHAPES["qwen3-0.6b"]["num_hidden_layers"]


def run_random_load(
    folder: Path,
    kv_cache_dtype: str,
    counting: Literal["on", "off"],
    started: Callable[[], None] = lambda: None,
) -> ExpertUse | None:
    """Run a random load with aborts, and check that it leaks nothing; return the use of experts.

    `started` is called when the engine is ready.
    """
    seconds = SECONDS / len(KV_DTYPES)
    with LLM(
        folder,
        device="cuda",
        load_format="dummy",
        skip_tokenizer=True,
        kv_cache_tokens=40_000,
        kv_cache_dtype=kv_cache_dtype,
        max_running_requests=64,
        prefill_chunk_tokens=1024,
        policy="priority",
        eviction="priority",
        check_integrity=True,
        expert_load=counting,
    ) as llm:
        started()
        engine, process = llm.engine, psutil.Process()
        random_load = RandomLoad(engine, seconds)
        memory_at_first: tuple[int, int] | None = None

        def memory_in_use() -> tuple[int, int]:
            """Return the GPU memory that PyTorch reserves and the process's resident memory, in bytes."""
            return torch.cuda.memory_reserved(), process.memory_info().rss

        while random_load.step():
            engine.expert_use(time.monotonic())
            if memory_at_first is None and random_load.elapsed > seconds / 2:
                memory_at_first = memory_in_use()
        load, memory_at_the_end = engine.load(), memory_in_use()
        assert random_load.errors == 0
        assert random_load.ended == random_load.submitted > 5 * seconds
        assert (load.running, load.waiting, load.pages_used) == (0, 0, 0)
        assert engine.integrity_faults == 0
        assert memory_at_first is not None
        assert memory_at_the_end[0] - memory_at_first[0] <= 64 * MIB, "GPU memory grows"
        assert memory_at_the_end[1] - memory_at_first[1] <= 256 * MIB, "the process grows"
        return engine.expert_use(time.monotonic())


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_a_full_cache_never_runs_out_of_memory(folder: Path, graphs: str) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    fraction = round((total - free + 12_000 * MIB) / total, 3)  # leaves some gigabytes for KV
    draw = np.random.default_rng(2)
    with LLM(
        folder,
        device="cuda",
        load_format="dummy",
        skip_tokenizer=True,
        memory_fraction=fraction,
        max_running_requests=128,
        prefill_chunk_tokens=4096,
        cuda_graph=graphs,
    ) as llm:
        engine, info = llm.engine, llm.engine.info
        assert info.kv_bytes == info.pages_total * info.page_size * 114_688
        assert info.kv_bytes > 1000 * MIB
        assert info.step_bytes > 100 * MIB
        assert info.device_bytes - info.free_bytes >= info.weights_bytes + info.kv_bytes
        needed = 2 * info.pages_total * info.page_size
        rid = prompted = 0
        while prompted < needed:
            rid += 1
            prompt = draw.integers(3, 10_000, 3000).astype(np.int32)
            prompted += len(prompt)
            sampling = SamplingParams(max_tokens=300, ignore_eos=True, **KINDS[rid % len(KINDS)])
            engine.submit(Request(rid=rid, prompt=prompt, sampling=sampling, seed=rid))
        ended_requests, fullest = 0, 0
        while engine.busy:
            output = engine.step(time.monotonic())
            engine.drain_cache_events()
            finished = [*(output.finished if output else ()), *engine.drain_finished()]
            assert all(end.reason is FinishReason.LENGTH for end in finished)
            ended_requests += len(finished)
            fullest = max(fullest, engine.load().pages_used + engine.load().pages_cached)
        assert ended_requests == rid
        assert fullest > 0.95 * info.pages_total
        used = total - torch.cuda.mem_get_info()[0]
        assert used <= fraction * total + 256 * MIB, "it uses more memory than allowed"
