# SPDX-License-Identifier: Apache-2.0
"""Prompts with images on several ranks: rank 0 encodes images, and all get the embeddings by a broadcast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensor_kit
from gpu_twins import make_prompts, read_rules, save_gpu_twin
from tensor_kit import SMALL, run_in_process

from mizzen import LLM, SamplingParams

pytestmark = tensor_kit.several_gpus
PROMPTS = 10
MEAN_ERROR, MAX_ERROR = 0.05, 0.5
"""Bounds of differences that rounding to bfloat16 causes, in nats."""


def answer(folder: Path, name: str, options: dict[str, Any]) -> list[list[tuple[int, float]]]:
    """Return the greedy tokens of prompts with images, each run twice, and their log probabilities."""
    prompts = [prompt for prompt, _ in make_prompts(read_rules(folder), name, PROMPTS)]
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    with LLM(folder, device="cuda", **SMALL, prefill_chunk_tokens=23, **options) as llm:
        answers = llm.generate(prompts, sampling) + llm.generate(prompts[::-1], sampling)
    return [
        [(token, item.logprob) for token, item in zip(each.token_ids, each.logprobs or (), strict=True)]
        for each in answers
    ]


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "llava-next"])
def test_two_ranks_compute_the_log_probabilities_of_one(name: str, tmp_path: Path) -> None:
    save_gpu_twin(tmp_path, name)
    alone = run_in_process(answer, tmp_path, name, {})
    together = run_in_process(answer, tmp_path, name, {"tensor": 2})
    errors: list[float] = []
    for ones, twos in zip(alone, together, strict=True):
        for (token, one), (other, two) in zip(ones, twos, strict=True):
            errors.append(abs(one - two))
            if token != other:
                break  # rounding has changed a choice, and the contexts differ from here on
    assert len(errors) > 8 * PROMPTS
    assert sum(errors) / len(errors) < MEAN_ERROR
    assert max(errors) < MAX_ERROR
