# SPDX-License-Identifier: Apache-2.0
"""`prompt_logprobs_from`: log probabilities of a prompt's suffix, with its prefix from the cache."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_llm import open_llm, prompt_tokens, record_plans

from mizzen import SamplingParams
from mizzen.core.request import FinishReason, Request
from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.loader import load_engine
from mizzen.offline import Completion


def suffix_params(first: int, top: int = 2) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=top, prompt_logprobs_from=first)


def check_suffix(model: Any, kit: SimpleNamespace, prompt: list[int], first: int, answer: Completion) -> None:
    exact = torch.log_softmax(kit.oracle(model, np.array(prompt)).double(), -1).numpy()
    assert answer.prompt_logprobs is not None
    first = max(1, first)
    assert [entry.token for entry in answer.prompt_logprobs] == prompt[first:]
    for row, entry in zip(exact[first - 1 :], answer.prompt_logprobs, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token], abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:2], abs=1e-4)


@pytest.mark.parametrize("chunk", [7, 8192])
def test_suffixes_equal_transformers(model: Any, kit: SimpleNamespace, tmp_path: Path, chunk: int) -> None:
    prefix = kit.tokens(41, seed=1).tolist()
    prompts = [prefix + kit.tokens(count, seed=count).tolist() for count in (1, 2, 9, 30)]
    prompts += [kit.tokens(5, seed=7).tolist(), kit.tokens(1, seed=8).tolist()]
    starts = [41, 40, 41, 57, 5, 0]
    params = [suffix_params(first) for first in starts]
    with open_llm(tmp_path, prefill_chunk_tokens=chunk) as llm:
        alone = [llm.generate([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
        together = llm.generate(prompts, params)
        whole = llm.generate(prompts, suffix_params(0))
    for answers in (alone, together):
        for prompt, first, answer in zip(prompts, starts, answers, strict=True):
            check_suffix(model, kit, prompt, first, answer)
    assert [answer.cached_tokens for answer in together[:4]] == [40, 36, 40, 56]  # at most `first` - 1
    for prompt, answer in zip(prompts, whole, strict=True):
        check_suffix(model, kit, prompt, 0, answer)
        assert answer.cached_tokens == 0


def test_requests_with_different_numbers_of_top_tokens_share_a_step(
    model: Any, kit: SimpleNamespace, tmp_path: Path
) -> None:
    prompts = [kit.tokens(20, seed=count).tolist() for count in range(4)]
    tops = (2, 0, 3, 0)
    with open_llm(tmp_path) as llm:
        answers = llm.generate(prompts, [suffix_params(9, top) for top in tops])
        expected = llm.generate(prompts, suffix_params(9, 3))
    for top, answer, full in zip(tops, answers, expected, strict=True):
        assert answer.prompt_logprobs is not None and full.prompt_logprobs is not None
        assert len(answer.prompt_logprobs) == 11
        for entry, best in zip(answer.prompt_logprobs, full.prompt_logprobs, strict=True):
            assert (entry.token, [token for token, _ in entry.top]) == (
                best.token,
                [token for token, _ in best.top[:top]],
            )
            assert entry.logprob == pytest.approx(best.logprob, abs=1e-4)


def test_shared_prefixes_are_computed_once(model: Any, kit: SimpleNamespace, tmp_path: Path) -> None:
    prefix = kit.tokens(200, seed=1).tolist()
    prompts = [prefix + kit.tokens(6, seed=count).tolist() for count in range(2, 10)]
    computed: list[int] = []
    for first in (0, 200):
        with open_llm(tmp_path) as llm:
            plans = record_plans(llm)
            answers = llm.generate(prompts, suffix_params(first))
        for prompt, answer in zip(prompts, answers, strict=True):
            check_suffix(model, kit, prompt, first, answer)
        computed.append(prompt_tokens(plans))
    assert computed[0] == 8 * 206
    assert computed[1] <= 206 + 7 * (6 + 4)  # at most a page more than each suffix


def test_suffixes_survive_preemption(model: Any, kit: SimpleNamespace, tmp_path: Path) -> None:
    """Requests that are retracted within their prompts or while they decode report each token once."""
    prompts = [kit.tokens(30, seed=count).tolist() for count in range(8)]
    params = [
        SamplingParams(
            temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=2, prompt_logprobs_from=first
        )
        for first in (0, 5, 12, 29, 30, 8, 3, 17)
    ]
    with open_llm(tmp_path, kv_cache_tokens=120, prefill_chunk_tokens=9) as llm:
        answers = llm.generate(prompts, params)
    for prompt, each, answer in zip(prompts, params, answers, strict=True):
        check_suffix(model, kit, prompt, each.prompt_logprobs_from, answer)


def test_a_start_beyond_the_prompt_is_refused(model: Any, kit: SimpleNamespace, tmp_path: Path) -> None:
    engine = load_engine(EngineOptions(model=str(tmp_path), device="cpu", kv_cache_tokens=256, threads=1))
    engine.submit(Request(rid=1, prompt=kit.tokens(4), sampling=suffix_params(5)))
    engine.step(0.0)
    (finished,) = engine.drain_finished()
    engine.close()
    assert finished.reason is FinishReason.ERROR
    assert finished.message == "prompt_logprobs_from must be at most 4, the number of prompt tokens, not 5"
