# SPDX-License-Identifier: Apache-2.0
"""Graphs of steps with prompt outputs: vectors, logits and log probabilities equal those of eager steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hopper import WITH_FA3

from mizzen import LLM, SamplingParams
from mizzen.engine.execution.step import StepExecutor

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


def save_twin(folder: Path, architecture: str) -> Path:
    """Save a seeded random model of a Qwen3 architecture; a classifier has two labels."""
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
    model: Any = getattr(transformers, architecture)(config).float().eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_twin(tmp_path_factory.mktemp("classifier"), "Qwen3ForSequenceClassification")


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_twin(tmp_path_factory.mktemp("generator"), "Qwen3ForCausalLM")


@pytest.mark.parametrize("chunk", [64, 2048])
def test_captured_results_equal_eager_ones(classifier: Path, chunk: int) -> None:
    prompts = prompts_of(1, 17, 200, 5, 64, 333)
    results: dict[str, list[np.ndarray]] = {}
    for graph in ("auto", "off"):
        options = {**OPTIONS, "cuda_graph": graph, "prefill_chunk_tokens": chunk}
        with LLM(classifier, **options) as llm:
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


@pytest.mark.parametrize("chunk", [64, 2048])
def test_captured_log_probabilities_of_suffixes_equal_eager_ones(
    generator: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, *suffixes = prompts_of(400, 1, 5, 9, 3)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, prompt_logprobs_from=400)
    # Graphs have as many rows of results as there are running requests; a step may need 18 + 4 rows.
    options = {**OPTIONS, "max_running_requests": 32, "prefill_chunk_tokens": chunk}
    results: dict[str, list[list[float]]] = {}
    eager_steps: list[object] = []
    run_eager = StepExecutor.run_eager

    def record(self: StepExecutor, *args: Any) -> Any:
        eager_steps.append(args)
        return run_eager(self, *args)

    for graph in ("auto", "off"):
        with LLM(generator, **options, cuda_graph=graph) as llm:
            monkeypatch.setattr(StepExecutor, "run_eager", record)
            eager_steps.clear()
            completions = llm.generate([prefix + suffix for suffix in suffixes], params)
            assert bool(eager_steps) == (graph == "off")
            monkeypatch.undo()
        results[graph] = [[token.logprob for token in one.prompt_logprobs or ()] for one in completions]
    assert [len(row) for row in results["auto"]] == [len(suffix) for suffix in suffixes]
    for captured, eager in zip(results["auto"], results["off"], strict=True):
        np.testing.assert_allclose(captured, eager, atol=0.1, rtol=0)
