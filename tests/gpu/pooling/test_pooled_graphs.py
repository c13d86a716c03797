# SPDX-License-Identifier: Apache-2.0
"""Graphs of models that do not generate: their embeddings and logits equal those of eager steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hopper import WITH_FA3

from mizzen import LLM

pytestmark = WITH_FA3

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "skip_tokenizer": True,
    "kv_cache_tokens": 8192,
    "max_running_requests": 16,
    "memory_fraction": 0.5,
}


def prompts_of(*sizes: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, 160, size).tolist() for size in sizes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random classifier with two labels."""
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        id2label={0: "a", 1: "b"},
    )
    model: Any = transformers.Qwen3ForSequenceClassification(config).float().eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("chunk", [64, 2048])
def test_captured_results_equal_eager_ones(folder: Path, chunk: int) -> None:
    prompts = prompts_of(1, 17, 200, 5, 64, 333)
    results: dict[str, list[np.ndarray]] = {}
    for graph in ("auto", "off"):
        options = {**OPTIONS, "cuda_graph": graph, "prefill_chunk_tokens": chunk}
        with LLM(folder, **options) as llm:
            step = llm.engine._loop._runner.step  # type: ignore[attr-defined]
            assert (step.prefill_graphs is not None and step.prefill_graphs.pools) == (graph == "auto")
            results[graph] = [
                llm.classify(prompts),
                llm.embed(prompts),
                llm.embed(prompts, pooling="mean"),
                llm.embed(prompts),  # with cached prefixes
            ]
    for captured, eager in zip(results["auto"], results["off"], strict=True):
        assert np.isfinite(captured).all()
        np.testing.assert_allclose(captured, eager, atol=0.02, rtol=0)
