"""Every kind of decoder layer on a GPU, in bfloat16: log probabilities equal those of Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from family_twins import TWINS, save_twin, set_dtype
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
RATIO, MARGIN = 2.0, 0.02
"""An error may be RATIO times that of Transformers in bfloat16, plus MARGIN (in nats)."""


def log_probabilities(model: Any, prompts: list[list[int]], answers: list[Completion]) -> torch.Tensor:
    """Return Transformers' log probabilities before each token of all answers, float32 [tokens, vocab]."""
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + answer.token_ids], device="cuda")
            rows.append(model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1))
    return torch.cat(rows)


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
    texts = prompts + prompts[:1] + prompts[3:]
    expected = log_probabilities(model, texts, answers)
    rounded = log_probabilities(set_dtype(model, torch.bfloat16), texts, answers)
    tokens = torch.tensor([token for answer in answers for token in answer.token_ids], device="cuda")[:, None]
    actual = torch.tensor([item.logprob for answer in answers for item in answer.logprobs or ()])
    assert len(actual) == 8 * SAMPLING.max_tokens
    expected_of_tokens, rounded_of_tokens = (
        table.gather(1, tokens)[:, 0].cpu() for table in (expected, rounded)
    )
    errors, errors_of_rounded = (
        (values - expected_of_tokens).abs() for values in (actual, rounded_of_tokens)
    )
    print(f"{twin}: {errors.mean():.4f} {errors.max():.3f}, Transformers {errors_of_rounded.mean():.4f}")
    assert errors.mean() < RATIO * errors_of_rounded.mean() + MARGIN / 4
    assert errors.max() < RATIO * errors_of_rounded.max() + MARGIN
    losses = expected.max(dim=1).values.cpu() - expected_of_tokens
    assert losses.max() < 2 * RATIO * errors_of_rounded.max() + MARGIN
