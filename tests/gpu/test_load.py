"""Memory under load: full of KV it never runs out, and after minutes of arrivals and aborts none is lost.

MIZZEN_LOAD_SECONDS sets how long the random load lasts: 20 by default, 240 for the full test.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from mizzen import LLM, SamplingParams
from mizzen.core.request import FinishReason, Request

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu import SHAPES

SECONDS = float(os.environ.get("MIZZEN_LOAD_SECONDS", "20"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(SECONDS + 300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 1 << 20
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.7, "frequency_penalty": 0.5, "logprobs": 5},
    {"temperature": 0.9, "repetition_penalty": 1.1, "logit_bias": ((5, 2.0),)},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The shape of Qwen3-0.6B; its weights are dummies."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
    return tmp_path


def request(rid: int, draw: np.random.Generator, longest: int) -> Request:
    """Draw a request; half of them share a beginning."""
    prompt = draw.integers(3, 10_000, int(draw.integers(1, longest)))
    if rid % 2:
        prompt[: longest // 4] = np.arange(longest // 4)[: len(prompt)]
    sampling = SamplingParams(
        max_tokens=int(draw.integers(1, 200)), ignore_eos=True, **KINDS[rid % len(KINDS)]
    )
    return Request(
        rid=rid,
        prompt=prompt.astype(np.int32),
        sampling=sampling,
        seed=rid,
        arrival=time.monotonic(),
        priority=int(draw.integers(0, 3)),
    )


def test_random_load_with_aborts_leaks_nothing(folder: Path) -> None:
    draw = np.random.default_rng(1)
    with LLM(
        folder,
        device="cuda",
        load_format="dummy",
        skip_tokenizer=True,
        kv_cache_tokens=40_000,
        max_running_requests=64,
        prefill_chunk_tokens=1024,
        policy="priority",
        eviction="priority",
        check_integrity=True,
    ) as llm:
        engine, live, ended, rid = llm.engine, set[int](), 0, 0
        begin, process = time.monotonic(), psutil.Process()
        early: tuple[int, int] | None = None

        def held() -> tuple[int, int]:
            """Return bytes on the GPU and of the process."""
            return torch.cuda.memory_reserved(), process.memory_info().rss

        while (elapsed := time.monotonic() - begin) < SECONDS or live:
            while elapsed < SECONDS and len(live) < 120:
                rid += 1
                engine.submit(request(rid, draw, 1500))
                live.add(rid)
            if live and draw.random() < 0.1:
                engine.abort(int(draw.choice(sorted(live))))
            output = engine.step(time.monotonic())
            engine.take_cache_events()
            done = [*(output.finished if output else ()), *engine.take_ended()]
            assert all(end.reason is not FinishReason.ERROR for end in done)
            live -= {end.rid for end in done}
            ended += len(done)
            if early is None and elapsed > SECONDS / 3:
                early = held()
        while engine.busy:  # a step may be in flight still
            engine.step(time.monotonic())
        load, late = engine.load(), held()
        assert ended == rid > 5 * SECONDS
        assert (load.running, load.waiting, load.pages_used) == (0, 0, 0)
        assert engine.integrity_faults == 0
        assert early is not None
        assert late[0] - early[0] <= 64 * MIB, "GPU memory grows"
        assert late[1] - early[1] <= 256 * MIB, "the process grows"


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
        needed = 2 * info.pages_total * info.page_size
        rid = prompted = 0
        while prompted < needed:
            rid += 1
            prompt = draw.integers(3, 10_000, 3000).astype(np.int32)
            prompted += len(prompt)
            sampling = SamplingParams(max_tokens=300, ignore_eos=True, **KINDS[rid % len(KINDS)])
            engine.submit(Request(rid=rid, prompt=prompt, sampling=sampling, seed=rid))
        ended, fullest = 0, 0
        while engine.busy:
            output = engine.step(time.monotonic())
            engine.take_cache_events()
            done = [*(output.finished if output else ()), *engine.take_ended()]
            assert all(end.reason is FinishReason.LENGTH for end in done)
            ended += len(done)
            fullest = max(fullest, engine.load().pages_used + engine.load().pages_cached)
        assert ended == rid
        assert fullest > 0.95 * info.pages_total
        used = total - torch.cuda.mem_get_info()[0]
        assert used <= fraction * total + 256 * MIB, "it takes more than it was told to"
