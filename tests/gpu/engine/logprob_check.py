# SPDX-License-Identifier: Apache-2.0
"""Comparison of the engine's log probabilities on a GPU, in bfloat16, with those of Transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from family_twins import set_dtype
from mizzen import LLM, SamplingParams
from mizzen.offline.llm import Completion

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
SAMPLING = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "skip_tokenizer": True,
    "kv_cache_tokens": 8192,
    "prefill_chunk_tokens": 64,
}
RATIO, MARGIN = 2.0, 0.02
"""An error may be RATIO times that of Transformers in bfloat16, plus MARGIN (in nats)."""


class Errors(NamedTuple):
    """Differences for each generated token, float32 [tokens], from Transformers in float32."""

    engine: torch.Tensor
    """Absolute errors of the engine's log probabilities."""
    rounded: torch.Tensor
    """Absolute errors of the log probabilities of Transformers in bfloat16."""
    losses: torch.Tensor
    """Log probability of the most likely token minus that of the generated one."""

    def check_means(self) -> None:
        assert self.engine.mean() < RATIO * self.rounded.mean() + MARGIN / 4

    def check_maxima(self) -> None:
        assert self.engine.max() < RATIO * self.rounded.max() + MARGIN


def generate(folder: Path, **options: Any) -> tuple[list[list[int]], list[Completion]]:
    """Answer prompts of several lengths together, then alone and with their prefixes cached."""
    numbers = np.random.default_rng(0)
    prompts = [numbers.integers(3, 512, length).tolist() for length in (200, 7, 1, 90, 33)]
    with LLM(folder, **OPTIONS, **options) as llm:
        answers = llm.generate(prompts, SAMPLING)
        answers += llm.generate(prompts[:1], SAMPLING) + llm.generate(prompts[3:], SAMPLING)
    return prompts + prompts[:1] + prompts[3:], answers


def log_probabilities(model: Any, prompts: list[list[int]], answers: list[Completion]) -> torch.Tensor:
    """Return Transformers' log probabilities before each token of all answers, float32 [tokens, vocab]."""
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + answer.token_ids], device=model.device)
            rows.append(model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).cpu())
    return torch.cat(rows)


def measure_errors(model: Any, folder: Path, **options: Any) -> Errors:
    """Generate with the engine, and compare the log probabilities with those of a Transformers model.

    `options` are engine options. The model is in float32, before and afterwards.
    """
    prompts, answers = generate(folder, **options)
    tokens = torch.tensor([token for answer in answers for token in answer.token_ids])
    actual = torch.tensor([item.logprob for answer in answers for item in answer.logprobs or ()])
    assert len(actual) == 8 * SAMPLING.max_tokens
    return find_errors(model, tokens, actual, lambda oracle: log_probabilities(oracle, prompts, answers))


def find_errors(
    model: Any, tokens: torch.Tensor, actual: torch.Tensor, compute_table: Callable[[Any], torch.Tensor]
) -> Errors:
    """Compare the engine's log probabilities `actual` of tokens with those of a Transformers model.

    `compute_table` returns the model's log probabilities before each token, float32 [tokens, vocab]. The
    model is in float32, before and afterwards.
    """
    columns = tokens[:, None]
    table = compute_table(model)
    rounded_table = compute_table(set_dtype(model, torch.bfloat16))
    set_dtype(model, torch.float32)
    expected, rounded = (values.gather(1, columns)[:, 0] for values in (table, rounded_table))
    errors = Errors(
        engine=(actual - expected).abs(),
        rounded=(rounded - expected).abs(),
        losses=table.max(dim=1).values - expected,
    )
    print(f"{errors.engine.mean():.4f} {errors.engine.max():.3f}, Transformers {errors.rounded.mean():.4f}")
    return errors
