# SPDX-License-Identifier: Apache-2.0
"""Captured decode steps sample the same tokens as eager ones, for any batch and number of steps in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common_parts.shapes import shape_folder
from hopper import WITH_FA3
from small_models import VOCABULARY
from torch.profiler import ProfilerActivity, profile

from mizzen import LLM, SamplingParams
from mizzen.core.request import Request
from mizzen.core.step_plan import PageWrites, PrefillChunk, StepPlan
from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.decode_graphs import DecodeGraphs
from mizzen.engine.execution.forward_batch import BatchLayout
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.execution.step import StepExecutor
from mizzen.engine.loading import model_setup, warmup
from mizzen.engine.uploader import Uploader
from mizzen.kernels import nvrtc
from mizzen.models.registry import read_config

pytestmark = WITH_FA3
OUTPUT = 40


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and parameters of all kinds; each prompt in the second half extends one in the first."""
    rng = np.random.default_rng(5)
    fresh = [rng.integers(3, VOCABULARY, n).tolist() for n in (1, 15, 16, 17, 64, 130, 200, 333)]
    prompts = fresh + [[*prompt, 7, 8, 9] for prompt in fresh]
    kinds = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 0},
        {"temperature": 1.1, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.7, "min_p": 0.05},
    ]
    params = [
        SamplingParams(**kinds[i % len(kinds)], seed=i, max_tokens=OUTPUT - i, ignore_eos=i % 3 != 0)
        for i in range(len(prompts))
    ]
    return prompts, params


def answers(folder: Path, **options: Any) -> list[list[int]]:
    prompts, params = workload()
    settings = {
        "kv_cache_tokens": 4096,
        "max_running_requests": 12,
        "prefill_chunk_tokens": 256,
        "cuda_graph_max_tokens": 0,  # captured steps with prefill have their own tests
        **options,
    }
    with LLM(folder, device="cuda", skip_tokenizer=True, check_integrity=True, **settings) as llm:
        runs = [llm.generate(prompts, params) for _ in range(2)]
        assert sum(answer.cached_tokens for answer in runs[1]) > 500
        assert llm.engine.load().pages_used == 0
    return [answer.token_ids for run in runs for answer in run]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("page", [1, 16])
def test_graphs_equal_eager_steps(
    folder: Path, page: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without padding, captured and eager steps have the same shapes, so they run the same kernels.
    monkeypatch.setattr(warmup, "batch_sizes", lambda largest: list(range(1, largest + 1)))
    options = {"page_size": page, "steps_in_flight": depth}
    assert answers(folder, **options) == answers(folder, **options, cuda_graph="off")


def test_batches_above_the_largest_graph_equal_eager_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 12 requests run, but graphs cover at most 4, so captured and eager steps alternate."""
    monkeypatch.setattr(warmup, "batch_sizes", lambda largest: list(range(1, largest + 1)))
    assert answers(folder, cuda_graph_max_batch=4) == answers(folder, cuda_graph="off")


def test_kernels_are_compiled_in_parallel_before_the_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling: list[str] = []

    def record_compilation(source: str, name: str, *how: Any) -> bytes:
        compiling.append(name)
        return load_or_compile_cubin(source, name, *how)

    def record_end_of_compilation(*args: Any) -> None:
        compile_kernels(*args)
        compiling.append("together")

    load_or_compile_cubin, compile_kernels = nvrtc.load_or_compile_cubin, warmup.compile_kernels
    monkeypatch.setattr(nvrtc, "load_or_compile_cubin", record_compilation)
    monkeypatch.setattr(warmup, "compile_kernels", record_end_of_compilation)
    nvrtc.load_kernel.cache_clear()
    options = {"max_running_requests": 128, "cuda_graph_max_tokens": 0, "kv_cache_tokens": 4096}
    with (
        shape_folder("qwen3-0.6b") as shape,
        LLM(shape, device="cuda", load_format="dummy", skip_tokenizer=True, **options),
    ):
        last = compiling.index("together")
        assert compiling[:last].count("swap_ab") > 10
        assert compiling[:last].count("flash_decode_mma") >= 4
        assert not {"swap_ab", "flash_decode_mma"} & set(compiling[last:])


def test_graphs_equal_eager_steps_with_8_bit_kv(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "batch_sizes", lambda largest: list(range(1, largest + 1)))
    assert answers(folder, kv_cache_dtype="fp8") == answers(folder, kv_cache_dtype="fp8", cuda_graph="off")


def test_graphs_with_host_planned_batches_equal_eager_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flashinfer")
    monkeypatch.setattr(warmup, "batch_sizes", lambda largest: list(range(1, largest + 1)))
    backends = {"attention_decode": "flashinfer", "attention_prefill": "flashinfer"}
    plain = answers(folder, **backends, cuda_graph="off")
    planned = answers(folder, **backends)
    equal_answers = sum(
        a == b for x, y in zip(plain, planned, strict=True) for a, b in zip(x, y, strict=False)
    )
    # Plans for graphs split rows differently, so sums round differently: a near tie may flip, and then all
    # later tokens differ.
    assert equal_answers > 0.7 * sum(len(x) for x in plain)


def test_padding_changes_only_rounding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = answers(folder, cuda_graph="off")
    monkeypatch.setattr(warmup, "batch_sizes", lambda largest: [largest])
    padded = answers(folder)
    # A bfloat16 GEMM of another shape may round differently and flip a near tie, and then all later tokens
    # differ.
    equal_answers = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), len(x))
        for x, y in zip(eager, padded, strict=True)
    ]
    assert sum(equal_answers) > 0.7 * sum(len(x) for x in eager)


def test_the_host_sends_nothing_while_the_batch_is_unchanged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    send = DecodeGraphs.send_batch

    def counted(self: DecodeGraphs, plan: StepPlan, *, with_pages: bool) -> None:
        copied.append(plan.step)
        send(self, plan, with_pages=with_pages)

    monkeypatch.setattr(DecodeGraphs, "send_batch", counted)
    draw = np.random.default_rng(4)
    options: dict[str, Any] = {"kv_cache_tokens": 4096, "max_running_requests": 8, "page_size": 128}
    with LLM(folder, device="cuda", skip_tokenizer=True, **options) as llm:
        engine = llm.engine
        for rid in range(6):
            sampling = SamplingParams(temperature=rid % 2, max_tokens=60, ignore_eos=True)
            prompt = draw.integers(3, VOCABULARY, 20).astype(np.int32)
            engine.submit(Request(rid=rid, prompt=prompt, sampling=sampling, seed=rid))
        for _ in range(10):
            engine.step(0.0)
        copies_before = len(copied)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(20):
                output = engine.step(0.0)
                assert output is not None and len(output.rids) == 6
            torch.cuda.synchronize()
        assert len(copied) == copies_before >= 1
        while engine.busy:
            engine.step(0.0)
    copies = {event.key: event.count for event in trace.key_averages() if "Memcpy" in event.key}
    assert not [key for key in copies if "HtoD" in key], copies
    assert [count for key, count in copies.items() if "DtoH" in key], copies  # copies of sampled tokens


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize(
    "sampling_params",
    [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.8, "frequency_penalty": 0.5, "logit_bias": ((7, 1.0),)},
        {"temperature": 0.8, "logprobs": 3},
    ],
    ids=str,
)
def test_no_step_waits_for_the_device(folder: Path, sampling_params: dict[str, Any], graphs: str) -> None:
    """Before it reads tokens, the host waits for an event; on any other synchronization, PyTorch raises."""
    draw = np.random.default_rng(6)
    options: dict[str, Any] = {"kv_cache_tokens": 4096, "max_running_requests": 8, "prefill_chunk_tokens": 64}
    sampling = SamplingParams(**sampling_params, max_tokens=12, ignore_eos=True)
    with LLM(folder, device="cuda", skip_tokenizer=True, cuda_graph=graphs, **options) as llm:
        for mode in ("default", "error"):  # kernels are loaded in the first round
            prompts = [draw.integers(3, VOCABULARY, n).tolist() for n in (5, 20, 64, 90)]
            torch.cuda.set_sync_debug_mode(mode)
            try:
                answers = llm.generate(prompts, sampling)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert [len(answer.token_ids) for answer in answers] == [12] * 4


def logits_of(
    folder: Path, dtype: str, fusion: str, kv: torch.dtype | None = None, attention: str = "reference"
) -> torch.Tensor:
    """Run a prompt, then two steps that decode it and prefill another one; return all logits in float32."""
    options = EngineOptions(model=str(folder), device="cuda", dtype=dtype, fusion=fusion)
    with torch.inference_mode():
        model = model_setup.make_model(options, read_config(folder), lambda done, total: None)
        mixed = model_setup.make_attention_with_kv(
            model, 16, 33, prefill=attention, decode=attention, dtype=kv
        )
        upload = Uploader(torch.device("cuda"))
        state = SlotState(2, 16, upload, scratch_page=32)
        step = StepExecutor(model, mixed, state, upload)
        draw = np.random.default_rng(2)
        pages = PageWrites(
            np.repeat([0, 1], 16).astype(np.int32),
            np.tile(np.arange(16), 2).astype(np.int32),
            draw.permutation(32).astype(np.int32),
        )
        state.write_pages(pages)
        prompts = [draw.integers(3, VOCABULARY, 100).astype(np.int32) for _ in range(2)]
        results = []
        for index, decode in enumerate(([], [0], [0])):
            chunk = PrefillChunk(slot=min(index, 1), start=0, tokens=prompts[min(index, 1)], last=True)
            plan = StepPlan(
                step=index,
                decode=np.array(decode, np.int32),
                decode_version=index,
                pages=PageWrites(),
                prefill=(chunk,),
            )
            results.append(model.logits(step.forward(plan, BatchLayout.from_plan(plan, state))).float())
            state.lengths[0] = 100 + index
            state.last_tokens[0] = 5 + index
    return torch.cat(results)


def test_fusion_costs_no_precision(folder: Path) -> None:
    exact = logits_of(folder, "float32", "off")
    torch.testing.assert_close(logits_of(folder, "float32", "auto"), exact, atol=1e-3, rtol=1e-3)
    plain, fused = (logits_of(folder, "bfloat16", fusion) - exact for fusion in ("off", "auto"))
    assert fused.norm() < 1.1 * plain.norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("fusion", ["off", "auto"])
@pytest.mark.parametrize(("attention", "most"), [("reference", 0.2), ("auto", 0.3)])
def test_8_bit_kv_loses_no_more_than_its_precision(
    folder: Path, attention: str, most: float, fusion: str
) -> None:
    """With fa3, prefill is less precise than the reference: it also rounds queries and softmax weights."""
    exact = logits_of(folder, "float32", "off")
    narrow = logits_of(folder, "bfloat16", fusion, torch.float8_e4m3fn, attention) - exact
    assert narrow.norm() < most * exact.norm()
