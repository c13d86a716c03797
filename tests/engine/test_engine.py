# SPDX-License-Identifier: Apache-2.0
"""The whole engine: outputs equal Transformers' and do not depend on timing, batching or the prefix cache."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import make, requests_of, run_requests

from mizzen.core.request import Finished, FinishReason, Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.step_plan import StepPlan
from mizzen.engine.overlap_loop import StepFailed

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def folder(kit: SimpleNamespace, tmp_path: Path) -> Path:
    kit.save_model(tmp_path, "qwen3")
    return tmp_path


def expected(model: Any, prompt: np.ndarray, count: int) -> list[int]:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_greedy_answers_equal_transformers(family: str, kit: SimpleNamespace, tmp_path: Path) -> None:
    # generate() with a minimum length forbids the end token, so the answers of the random models must not
    # contain it.
    model = kit.save_model(tmp_path, family, eos_token_id=None, seed=5)
    lengths = [1, 3, 40, 17, 64, 5, 33]
    prompts = [kit.tokens(n, seed=n) for n in lengths]
    prompts.append(np.concatenate([prompts[4][:48], prompts[2][:9]]))  # shares a prefix
    requests = requests_of(prompts, [GREEDY] * len(prompts))
    engine = make(tmp_path, prefill_chunk_tokens=24, max_running_requests=5)
    tokens, ends = run_requests(engine, requests, [0, 0, 1, 2, 2, 7, 8, 20])
    assert tokens == {r.rid: expected(model, r.prompt, 12) for r in requests}
    assert {end.reason for end in ends.values()} == {FinishReason.LENGTH}
    assert ends[7].cached_tokens == 48


def mixed_params(count: int) -> list[SamplingParams]:
    kinds = [
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=20),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, max_tokens=14, ignore_eos=True),
        SamplingParams(temperature=1.2, min_p=0.05, max_tokens=25, stop_token_ids=(9, 10, 11, 12)),
    ]
    return [kinds[i % len(kinds)] for i in range(count)]


def traffic(kit: SimpleNamespace) -> tuple[list[Request], list[int]]:
    """Return requests of many kinds, some with shared prefixes, that arrive over time."""
    rng = random.Random(3)
    base = kit.tokens(60, seed=99)
    prompts = []
    for i in range(16):
        own = kit.tokens(rng.randint(1, 30), seed=i)
        prompts.append(np.concatenate([base[: rng.choice([0, 0, 24, 60])], own]).astype(np.int32))
    return requests_of(prompts, mixed_params(16)), [rng.randint(0, 25) for _ in prompts]


def test_overlap_cache_batching_and_delays_change_no_token(kit: SimpleNamespace, folder: Path) -> None:
    requests, arrivals = traffic(kit)
    plain, plain_ends = run_requests(
        make(folder, steps_in_flight=1, prefix_cache="none", max_running_requests=1), requests
    )
    assert len({end.reason for end in plain_ends.values()}) == 2
    rng = random.Random(4)

    def delay(plan: StepPlan) -> float:
        return rng.choice([0.0, 0.0, 0.002])

    for options in (
        {"steps_in_flight": 2},
        {"steps_in_flight": 4, "prefill_chunk_tokens": 7},
        {"steps_in_flight": 2, "page_size": 1, "max_running_requests": 3},
        {"steps_in_flight": 3, "attention_prefill": "reference", "attention_decode": "reference"},
    ):
        tokens, ends = run_requests(make(folder, delay, **options), requests, arrivals)
        assert tokens == plain, options
        assert {r: e.reason for r, e in ends.items()} == {r: e.reason for r, e in plain_ends.items()}


def test_preemption_changes_no_token(kit: SimpleNamespace, folder: Path) -> None:
    requests, _ = traffic(kit)
    roomy, _ = run_requests(make(folder), requests)
    tight, ends = run_requests(make(folder, kv_cache_tokens=160), requests)
    assert tight == roomy
    assert all(end.reason is not FinishReason.ERROR for end in ends.values())


def test_end_tokens_stop_unless_ignored(kit: SimpleNamespace, folder: Path) -> None:
    prompt = kit.tokens(8, seed=1)
    free, _ = run_requests(make(folder), requests_of([prompt], [GREEDY]))
    end = free[0][4]
    first = free[0].index(end)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{end}]}}')
    plain = SamplingParams(temperature=0, max_tokens=12)
    tokens, ends = run_requests(make(folder), requests_of([prompt] * 2, [plain, GREEDY]))
    assert tokens == {0: free[0][: first + 1], 1: free[0]}
    assert ends[0].reason is FinishReason.STOP
    assert ends[0].stop_token == end
    assert ends[1].reason is FinishReason.LENGTH


def test_an_abort_does_not_affect_other_requests(kit: SimpleNamespace, folder: Path) -> None:
    requests, _ = traffic(kit)
    calm, _ = run_requests(make(folder), requests)
    engine = make(folder, lambda plan: 0.001, max_running_requests=6)
    for request in requests:
        engine.submit(request)
    tokens: dict[int, list[int]] = {request.rid: [] for request in requests}
    ends: dict[int, Finished] = {}
    for step in range(10**6):
        if not engine.busy:
            break
        if step % 3 == 0 and step // 3 < 16:
            engine.abort(step // 3 if (step // 3) % 2 else 0)
        output = engine.step(float(step))
        if output is not None:
            for rid, token in zip(output.rids.tolist(), output.tokens.tolist(), strict=True):
                tokens[rid].append(token)
            ends |= {end.rid: end for end in output.finished}
        ends |= {end.rid: end for end in engine.drain_finished()}
    engine.close()
    assert set(ends) == set(tokens)
    assert any(end.reason is FinishReason.ABORT for end in ends.values())
    for rid, end in ends.items():
        assert tokens[rid] == calm[rid][: len(tokens[rid])]
        assert end.output_tokens == len(tokens[rid])
        assert end.reason is FinishReason.ABORT or tokens[rid] == calm[rid]


def test_a_failed_step_raises_step_failed(kit: SimpleNamespace, folder: Path) -> None:
    def fail(plan: StepPlan) -> float:
        if plan.step == 3:
            raise OSError("the device is gone")
        return 0.0

    with pytest.raises(StepFailed, match="step 3 failed: the device is gone"):
        run_requests(make(folder, fail), requests_of([kit.tokens(5)], [GREEDY]))


def test_half_precision_runs_on_the_cpu(kit: SimpleNamespace, folder: Path) -> None:
    tokens, _ = run_requests(make(folder, dtype="bfloat16"), traffic(kit)[0])
    assert all(tokens.values())
