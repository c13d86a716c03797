"""Models that run through Transformers on a GPU: log probabilities equal those of Transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from family_twins import OTHERS, save_other_twin, save_twin, set_dtype
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
    "head_dim": 64,
}
GPT: dict[str, Any] = {"vocab_size": 512, "n_embd": 256, "n_head": 4, "n_inner": 512, "n_positions": 2048}
CHANGES: dict[str, dict[str, Any]] = {
    "GPT2": GPT,
    "GPTBigCode": GPT,
    "OPT": {"ffn_dim": 512, "word_embed_proj_dim": 256},
    "Cwm": {"sliding_window": 64},
    "Ministral": {"sliding_window": 64},
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


def prompts() -> list[list[int]]:
    numbers = np.random.default_rng(0)
    return [numbers.integers(3, 512, length).tolist() for length in (200, 7, 1, 90, 33)]


def generate(folder: Path, **options: Any) -> tuple[list[list[int]], list[Completion]]:
    """Answer prompts of several lengths together, then alone and with their prefixes cached."""
    texts = prompts()
    with LLM(folder, **OPTIONS, **options) as llm:
        answers = llm.generate(texts, SAMPLING)
        answers += llm.generate(texts[:1], SAMPLING) + llm.generate(texts[3:], SAMPLING)
    return texts + texts[:1] + texts[3:], answers


def log_probabilities(model: Any, texts: list[list[int]], answers: list[Completion]) -> torch.Tensor:
    """Return Transformers' log probability of each token of all answers, float32 [tokens]."""
    rows = []
    for text, answer in zip(texts, answers, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([text + answer.token_ids], device="cuda")
            table = model(ids).logits[0, len(text) - 1 : -1].float().log_softmax(-1)
            rows.append(table.gather(1, ids[0, len(text) :, None])[:, 0].cpu())
    return torch.cat(rows)


def check_answers(model: Any, folder: Path, **options: Any) -> None:
    texts, answers = generate(folder, **options)
    actual = torch.tensor([item.logprob for answer in answers for item in answer.logprobs or ()])
    assert len(actual) == 8 * SAMPLING.max_tokens
    expected = log_probabilities(model, texts, answers)
    rounded = log_probabilities(set_dtype(model, torch.bfloat16), texts, answers)
    set_dtype(model, torch.float32)
    errors, errors_of_rounded = ((values - expected).abs() for values in (actual, rounded))
    print(f"{errors.mean():.4f} {errors.max():.3f}, Transformers {errors_of_rounded.mean():.4f}")
    assert errors.mean() < RATIO * errors_of_rounded.mean() + MARGIN / 4
    if not hasattr(model.config, "num_experts_per_tok"):
        # A rounding error may choose another expert for a token, which changes a single value by much more.
        assert errors.max() < RATIO * errors_of_rounded.max() + MARGIN


@pytest.mark.parametrize("fusion", ["auto", "off"])
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_llama_equals_transformers_and_the_native_model(graphs: str, fusion: str, tmp_path: Path) -> None:
    model = save_other_twin(tmp_path, "Llama", dtype=torch.bfloat16, **SIZES).cuda()
    for implementation in ("native", "transformers"):
        check_answers(model, tmp_path, cuda_graph=graphs, fusion=fusion, model_implementation=implementation)


@pytest.mark.parametrize("twin", ["gemma2", "olmo2"])
def test_native_twins_equal_transformers(twin: str, tmp_path: Path) -> None:
    window = {"sliding_window": 64} if twin == "gemma2" else {}
    model = save_twin(tmp_path, twin, dtype=torch.bfloat16, **SIZES, **window).cuda()
    check_answers(model, tmp_path, model_implementation="transformers")


@pytest.mark.parametrize("prefix", OTHERS)
def test_other_architectures_equal_transformers(prefix: str, tmp_path: Path) -> None:
    sizes = {} if prefix.startswith("GPT") and prefix != "GPTNeoX" else SIZES
    model = save_other_twin(tmp_path, prefix, dtype=torch.bfloat16, **sizes, **CHANGES.get(prefix, {})).cuda()
    check_answers(model, tmp_path)
