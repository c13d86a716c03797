# SPDX-License-Identifier: Apache-2.0
"""Prompts with images on a GPU, in bfloat16: log probabilities equal those of Transformers, in every family.

Chunks end within images, several prompts share images, and half of them run again with cached prefixes. With
a small store, embeddings are dropped and computed again all the time.
"""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_twins import largest_embeddings, make_prompts, on_device, read_rules, save_gpu_twin
from logprob_check import MARGIN, OPTIONS, RATIO, SAMPLING, Errors, find_errors
from vision_folders import FAMILIES, VisionFamily, prompt_inputs

from mizzen import LLM, ImagePrompt
from mizzen.offline.image_prompts import PreparedImages
from mizzen.offline.llm import Completion

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = 10
CHUNK = 23
"""Maximum number of prompt tokens in a step: less than an image has."""
FIRST_SPECIAL, LAST_SPECIAL = 149, 153
"""Range of the token ids of images and videos, and of those around them."""
Prompts = list[tuple[ImagePrompt, PreparedImages]]


def log_probabilities(
    model: Any, family: VisionFamily, prompts: Prompts, answers: list[list[int]]
) -> torch.Tensor:
    """Return Transformers' log probabilities before each token of all answers, float32 [tokens, vocab]."""
    rows = []
    for (prompt, prepared), answer in zip(prompts, answers, strict=True):
        length = len(prepared.ids)
        ids = np.concatenate([prepared.ids, answer]).astype(np.int32)
        inputs = on_device(model, prompt_inputs(family, ids, [*map(as_bytes, prompt.images)]))
        if hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = None
        with torch.inference_mode():
            logits = model(**inputs, use_cache=False).logits[0, length - 1 : -1]
        rows.append(logits.float().log_softmax(-1).cpu())
    return torch.cat(rows)


def before_images(tokens: list[int]) -> list[int]:
    """Return tokens up to the first that Transformers would take for a part of an image."""
    return [*takewhile(lambda token: not FIRST_SPECIAL <= token <= LAST_SPECIAL, tokens)]


def as_bytes(source: object) -> bytes:
    assert isinstance(source, bytes)
    return source


def compare(model: Any, family: VisionFamily, prompts: Prompts, answers: list[Completion]) -> Errors:
    """Compare the log probabilities of answers with those of a model of Transformers in float32."""
    outputs = [before_images(answer.token_ids) for answer in answers]
    tokens = torch.tensor([token for output in outputs for token in output])
    actual = torch.tensor(
        [
            item.logprob
            for output, answer in zip(outputs, answers, strict=True)
            for _, item in zip(output, answer.logprobs or (), strict=False)
        ]
    )
    assert len(actual) == len(tokens) > len(prompts) * SAMPLING.max_tokens / 2
    return find_errors(
        model, tokens, actual, lambda oracle: log_probabilities(oracle, family, prompts, outputs)
    )


@pytest.mark.parametrize(
    ("graphs", "small_store"),
    [("auto", False), ("auto", True), ("off", True)],
    ids=["graphs", "small-store", "eager"],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probabilities_equal_transformers(
    name: str, graphs: str, small_store: bool, tmp_path: Path
) -> None:
    model, family = save_gpu_twin(tmp_path, name)
    rules = read_rules(tmp_path)
    prompts = make_prompts(rules, name, PROMPTS)
    again = prompts[: PROMPTS // 2]
    options = {**OPTIONS, "prefill_chunk_tokens": CHUNK, "cuda_graph": graphs}
    if small_store:
        options["image_cache_tokens"] = largest_embeddings(rules)
    with LLM(tmp_path, **options, max_running_requests=6, check_integrity=True) as llm:
        answers = llm.generate([prompt for prompt, _ in prompts], SAMPLING)
        answers += llm.generate([prompt for prompt, _ in again], SAMPLING)
        assert llm.engine.integrity_faults == 0
        counts = llm.engine.image_statistics.decoding
    page = llm.options.page_size
    for (_, prepared), answer in zip(again, answers[PROMPTS:], strict=True):
        assert answer.cached_tokens == (len(prepared.ids) - 1) // page * page
    different = {image.digest for _, prepared in prompts for image in prepared.images}
    assert counts.decoded >= len(different)
    if not small_store:
        assert counts.decoded <= len(different) + sum(len(prepared.images) for _, prepared in again)
    errors = compare(model.to(OPTIONS["device"]), family, prompts + again, answers)
    errors.check_means()
    if "moe" not in name:
        # A rounding error may choose another expert for a token, which changes a single value by much more.
        errors.check_maxima()
        assert errors.losses.max() < 2 * RATIO * errors.rounded.max() + MARGIN
