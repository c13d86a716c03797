"""Every kind of decoder layer on a GPU, in bfloat16: log probabilities equal those of Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from family_twins import TWINS, save_twin
from mizzen import LLM, SamplingParams
from mizzen.offline.llm import Completion

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
SAMPLING = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
MAX_ERROR, MAX_MEAN_ERROR, MAX_LOSS = 0.2, 0.03, 0.3
"""Bounds of the error of a log probability, of the mean error, and of how far the log probability of a greedy
token may be below the highest one."""


def errors_of(model: Any, prompts: list[list[int]], answers: list[Completion]) -> tuple[list[float], float]:
    """Return the errors of the log probabilities of all answers, and the largest loss of a greedy token."""
    errors, loss = [], 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + answer.token_ids], device="cuda")
            expected = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        for row, token, actual in zip(expected, answer.token_ids, answer.logprobs or (), strict=True):
            errors.append(abs(float(row[token]) - actual.logprob))
            loss = max(loss, float(row.max() - row[token]))
    return errors, loss


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("twin", [name for name in TWINS if "phi4" not in name])
def test_log_probabilities_equal_transformers(twin: str, graphs: str, tmp_path: Path) -> None:
    """Prompts of several lengths run together, then alone and with their prefixes cached."""
    window = {"sliding_window": 64} if TWINS[twin][1].get("sliding_window") else {}
    head_dim = {} if "head_dim" in TWINS[twin][1] else {"head_dim": 64}

    model = save_twin(tmp_path, twin, dtype=torch.bfloat16, **SIZES, **window, **head_dim).cuda()
    numbers = np.random.default_rng(0)
    prompts = [numbers.integers(3, 512, length).tolist() for length in (200, 7, 1, 90, 33)]
    options = {"skip_tokenizer": True, "kv_cache_tokens": 8192, "prefill_chunk_tokens": 64}
    with LLM(tmp_path, device="cuda", cuda_graph=graphs, dtype="bfloat16", **options) as llm:
        answers = llm.generate(prompts, SAMPLING)
        answers += llm.generate(prompts[:1], SAMPLING) + llm.generate(prompts[3:], SAMPLING)
    errors, loss = errors_of(model, prompts + prompts[:1] + prompts[3:], answers)
    assert len(errors) == 8 * SAMPLING.max_tokens
    assert max(errors) < MAX_ERROR
    assert sum(errors) / len(errors) < MAX_MEAN_ERROR
    assert loss < MAX_LOSS
