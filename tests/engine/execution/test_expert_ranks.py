# SPDX-License-Identifier: Apache-2.0
"""Mixtures whose experts are divided among ranks answer as on one rank, and as in Transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rank_kit import thread_ranks

from mizzen.core.request import Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.engine.engine import Engine

VOCABULARY = 157
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
TOKENS = 10
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 30}


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, VOCABULARY, length).astype(np.int32) for length in (45, 7, 20)]


def answer(engine: Engine) -> dict[int, list[int]]:
    """Run one greedy request and two sampled ones together; return the tokens of each."""
    for rid, prompt in enumerate(prompts()):
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **(SAMPLED if rid else GREEDY))
        engine.submit(Request(rid=rid, prompt=prompt, sampling=sampling, seed=rid))
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while engine.busy:
        output = engine.step(0.0)
        if output is not None:
            for rid, token in zip(output.rids.tolist(), output.tokens.tolist(), strict=True):
                tokens[rid].append(token)
    return tokens


def answer_in_transformers(model: Any) -> list[int]:
    """Return the greedy answer to the first prompt."""
    prompt = torch.from_numpy(prompts()[0].astype(np.int64))[None]
    model.generation_config.eos_token_id = None
    ids = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
    return ids[0, prompt.shape[1] :].tolist()


MIXTURES: dict[str, dict[str, Any]] = {
    "glm4-moe": {},
    "granite-moe": {"num_local_experts": 8},
    "qwen2-moe": {"num_experts": 8},
    "gpt-oss": {"num_local_experts": 8},
}
"""Separate experts with a shared one, stacked experts, a shared one with a gate, and experts with biases."""


@pytest.mark.parametrize("twin", MIXTURES)
def test_whole_experts_answer_as_on_one_rank_and_in_transformers(
    twin: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    model = kit.save_twin(tmp_path, twin, **SHAPE | MIXTURES[twin])
    with thread_ranks(tmp_path, 1, prefill_chunk_tokens=32) as engine:
        alone = answer(engine)
    assert alone[0] == answer_in_transformers(model)
    for ranks, expert in ((2, 2), (4, 2), (4, 4)):
        with thread_ranks(tmp_path, ranks, expert=expert, prefill_chunk_tokens=32) as engine:
            assert answer(engine) == alone, (ranks, expert)


@pytest.mark.parametrize(("width", "expert"), [(24, 1), (18, 2), (17, 4)])
def test_the_division_of_experts_is_derived_from_their_width(
    width: int, expert: int, kit: SimpleNamespace, tmp_path: Path
) -> None:
    kit.save_twin(tmp_path, "qwen3-moe", **SHAPE, num_experts=8, moe_intermediate_size=width)
    results = []
    for ranks in (1, 4):
        with thread_ranks(tmp_path, ranks, prefill_chunk_tokens=32) as engine:
            results.append(answer(engine))
            assert engine.info.expert_groups == (expert if ranks == 4 else 1)
    assert results[0] == results[1]
