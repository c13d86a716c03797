# SPDX-License-Identifier: Apache-2.0
"""Greedy answers equal those of Transformers' `generate`, for every twin and in mixed batches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_runs import make, requests_of, run_requests

from family_twins import OTHERS, TWINS, TWINS_THROUGH_TRANSFORMERS, save_other_twin
from mizzen.core.sampling_params import SamplingParams

ANSWER = 10
GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
NEAR_TIE = 1e-3
"""Difference of two logits below which either token may come first, because float32 rounds."""
SHARED = 36
"""Number of tokens that the last prompt has in common with the second."""
UNTIED = {"tie_word_embeddings": False}
"""With a tied head, many small random models only repeat the last token."""
LENGTHS = (3, 45, 17, 29)
LONG_ENOUGH = {"phi4-mini-long": 9}
"""Lengths from which Transformers uses the rotary embedding of the whole context, as Mizzen always does."""


def make_prompts(kit: SimpleNamespace, shortest: int) -> list[np.ndarray]:
    """Return prompts of different lengths; the last one begins like the second."""
    prompts = [kit.tokens(max(length, shortest), seed=length) for length in LENGTHS]
    return [*prompts, np.concatenate([prompts[1][:SHARED], kit.tokens(5, seed=5)])]


def generate(model: Any, prompt: np.ndarray) -> list[int]:
    """Return the greedy answer of Transformers, which no token ends."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=ANSWER
        )
    answer = output[0, len(prompt) :].tolist()
    assert len(answer) == ANSWER
    return answer


def check_answer(kit: SimpleNamespace, model: Any, prompt: np.ndarray, answer: list[int]) -> int:
    """Compare an answer with that of Transformers; return the number of equal tokens.

    The answers may part only where the logits of both tokens are almost equal.
    """
    expected = generate(model, prompt)
    assert len(answer) == ANSWER
    for i, (token, other) in enumerate(zip(answer, expected, strict=True)):
        if token != other:
            text = np.concatenate([prompt, np.array(answer[:i], np.int32)])
            logits = kit.oracle(model, text)[-1]
            gap = float(logits[other] - logits[token])
            assert gap < NEAR_TIE, f"token {i} is {token} instead of {other}: their logits differ by {gap}"
            return i
    return ANSWER


def check_greedy(
    kit: SimpleNamespace, folder: Path, model: Any, *, shortest: int = 1, **options: Any
) -> None:
    """Compare the answers of a mixed batch with Transformers.

    Requests arrive while others run, prompts are computed in chunks, and one prompt finds its first tokens in
    the prefix cache.
    """
    prompts = make_prompts(kit, shortest)
    engine = make(folder, prefill_chunk_tokens=16, max_running_requests=4, **options)
    requests = requests_of(prompts, [GREEDY] * len(prompts))
    answers, ends = run_requests(engine, requests, [0, 0, 1, 4, 9])
    assert ends[len(prompts) - 1].cached_tokens == SHARED
    equal = sum(check_answer(kit, model, prompt, answers[rid]) for rid, prompt in enumerate(prompts))
    assert equal > 0.8 * ANSWER * len(prompts)


@pytest.mark.parametrize("twin", TWINS)
def test_native_models_answer_as_transformers(twin: str, kit: SimpleNamespace, tmp_path: Path) -> None:
    model = kit.save_twin(tmp_path, twin, **UNTIED)
    check_greedy(kit, tmp_path, model, shortest=LONG_ENOUGH.get(twin, 1))


@pytest.mark.parametrize("prefix", OTHERS)
def test_models_of_transformers_answer_as_transformers(
    prefix: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    check_greedy(kit, tmp_path, save_other_twin(tmp_path, prefix, **UNTIED))


@pytest.mark.parametrize("twin", TWINS_THROUGH_TRANSFORMERS)
def test_native_twins_run_through_transformers_answer_the_same(
    twin: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    model = kit.save_twin(tmp_path, twin, **UNTIED)
    check_greedy(kit, tmp_path, model, model_implementation="transformers")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_native_families_run_through_transformers_answer_the_same(
    family: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    check_greedy(kit, tmp_path, kit.save_model(tmp_path, family), model_implementation="transformers")


def test_a_wrong_token_is_noticed(kit: SimpleNamespace, tmp_path: Path) -> None:
    model, prompt = kit.save_model(tmp_path, "llama"), kit.tokens(20, seed=1)
    answer = generate(model, prompt)
    assert check_answer(kit, model, prompt, answer) == ANSWER
    answer[4] = 3 if answer[4] != 3 else 4
    with pytest.raises(AssertionError, match="token 4 is"):
        check_answer(kit, model, prompt, answer)
