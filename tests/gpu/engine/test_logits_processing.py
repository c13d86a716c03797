# SPDX-License-Identifier: Apache-2.0
"""Processed logits, log probabilities and embeddings on a GPU equal the CPU's, with graphs too.

The kernel's test runs in Triton's interpreter too (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import VOCABULARY, make_model
from triton_device import DEVICE, GPU, RUNS_TRITON

from mizzen import LLM, SamplingParams
from mizzen.core.step_plan import SlotOptions, SlotStart
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.loading import warmup
from mizzen.engine.sampling.sampler import apply_penalties
from mizzen.engine.uploader import Uploader
from mizzen.offline import Completion

pytestmark = RUNS_TRITON
on_a_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")


@pytest.mark.parametrize("vocab", [7, 4096, 9001])
def test_the_penalty_kernel_equals_the_eager_reference(vocab: int) -> None:
    upload, rng = Uploader(DEVICE), np.random.default_rng(vocab)
    state = SlotState(9, 4, upload, scratch_page=0, vocab=vocab)
    slots = rng.permutation(9)[:7]
    starts = []
    for number, slot in enumerate(slots.tolist()):
        sampling = SamplingParams(
            frequency_penalty=[0.0, 1.5, -0.5][number % 3],
            presence_penalty=[0.3, 0.0][number % 2],
            repetition_penalty=[1.0, 1.7, 0.5][number % 3],
        )
        tokens = rng.integers(0, vocab, 400).astype(np.int32)
        options = SlotOptions(tokens=tokens, prompt_tokens=150)
        starts.append(SlotStart(slot=slot, length=0, sampling=sampling, seed=0, options=options))
    state.start_slots(tuple(starts))
    batch = state.logits_params.gather_batch(slots, np.full(7, 400))
    assert batch is not None
    assert batch.penalties is not None
    logits = torch.from_numpy(rng.normal(0, 3, (7, vocab)).astype(np.float32)).to(DEVICE)
    plain, fused = logits.clone(), logits.clone()
    apply_penalties(plain, batch.penalties, state.logits_params.counts)
    apply_penalties(fused, batch.penalties, state.logits_params.counts, fused=True)
    assert not torch.equal(plain, logits)
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Qwen3 in float32."""
    folder = tmp_path_factory.mktemp("qwen3")
    make_model("qwen3").save_pretrained(folder)
    return folder


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and parameters of all kinds; each prompt in the second half extends one in the first."""
    rng = np.random.default_rng(5)
    fresh = [rng.integers(3, VOCABULARY, n).tolist() for n in (1, 15, 16, 17, 64, 130)]
    prompts = fresh + [[*prompt, 7, 8, 9] for prompt in fresh]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "frequency_penalty": 1.2, "logprobs": 3},
        {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.5, "min_tokens": 20},
        {"temperature": 0.8, "logprobs": 0, "logprob_token_ids": (9, 11)},
        {"temperature": 0, "min_tokens": 12, "logit_bias": ((2, 100.0), (9, -100.0), (11, 2.0))},
        {"temperature": 0.7, "min_p": 0.05},
        {"temperature": 0, "presence_penalty": 1.9, "prompt_logprobs": 2, "logprobs": 20},
    ]
    params = [SamplingParams(seed=i, max_tokens=30 - i, **kinds[i % len(kinds)]) for i in range(len(prompts))]
    return prompts, params


def answers(folder: Path, **options: Any) -> list[Completion]:
    prompts, params = workload()
    # Only decode steps are captured here; steps with prefill run the same kernels in both engines.
    settings = {
        "kv_cache_tokens": 4096,
        "max_running_requests": 9,
        "prefill_chunk_tokens": 64,
        "cuda_graph_max_tokens": 0,
        **options,
    }
    with LLM(folder, skip_tokenizer=True, check_integrity=True, **settings) as llm:
        results = [answer for _ in range(2) for answer in llm.generate(prompts, params)]
        assert llm.engine.load().pages_used == 0
    return results


def check_equal(completions: list[Completion], references: list[Completion], tolerance: float) -> None:
    assert [answer.token_ids for answer in completions] == [answer.token_ids for answer in references]
    for completion, reference in zip(completions, references, strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            a, b = getattr(completion, name), getattr(reference, name)
            assert (a is None) == (b is None)
            values = [[entry.logprob, *(v for _, v in entry.top), *entry.requested] for entry in a or []]
            expected = [[entry.logprob, *(v for _, v in entry.top), *entry.requested] for entry in b or []]
            assert len(values) == len(expected)
            for x, y in zip(values, expected, strict=True):
                assert x == pytest.approx(y, abs=tolerance)


@on_a_gpu
def test_gpu_answers_equal_cpu_answers(folder: Path) -> None:
    plain = answers(folder, device="cpu", dtype="float32")
    assert {answer.finish_reason for answer in plain} == {"stop", "length"}
    # GEMMs in float32 round differently, but this model has no near ties.
    check_equal(answers(folder, device="cuda", dtype="float32"), plain, 2e-3)


@on_a_gpu
@pytest.mark.parametrize("depth", [1, 3])
def test_graphs_equal_eager_steps(folder: Path, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without padding, captured and eager steps have the same shapes, so they run the same kernels.
    monkeypatch.setattr(warmup, "batch_sizes", lambda largest: list(range(1, largest + 1)))
    options = {"device": "cuda", "dtype": "bfloat16", "steps_in_flight": depth}
    check_equal(answers(folder, **options), answers(folder, **options, cuda_graph="off"), 1e-3)


@on_a_gpu
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_gpu_embeddings_equal_cpu_embeddings(folder: Path, pooling: str) -> None:
    prompts, _ = workload()
    vectors = []
    for device in ("cpu", "cuda"):
        options = {"dtype": "float32", "kv_cache_tokens": 4096, "prefill_chunk_tokens": 48}
        with LLM(folder, device=device, skip_tokenizer=True, **options) as llm:
            vectors.append(llm.embed(prompts, pooling=pooling))
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-3)
