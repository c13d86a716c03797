# SPDX-License-Identifier: Apache-2.0
"""Classifiers: logits and scores equal those of Transformers, alone and in batches, and labels are read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from family_twins import save_twin
from mizzen import LLM, SamplingParams
from mizzen.common.model_task import ScoreActivation, Task, apply_activation
from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.models.model_families import CLASSIFIERS, FAMILIES
from mizzen.models.pooling.labels import read_labels, read_score_activation
from mizzen.models.registry import read_config
from mizzen.weights.checkpoint_files import WeightsError

OPTIONS: dict[str, Any] = {"device": "cpu", "skip_tokenizer": True, "kv_cache_tokens": 1024, "threads": 1}
NAMES = {0: "bad", 1: "fine", 2: "good"}


def save_classifier(folder: Path, twin: str = "qwen3", **changes: Any) -> Any:
    head = "TextForSequenceClassification" if twin == "gemma3" else "ForSequenceClassification"
    return save_twin(folder, twin, head=head, **{"id2label": NAMES, **changes})


def exact_logits(model: Any, prompt: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].numpy()


@pytest.mark.parametrize(
    "twin", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "glm4", "mixtral", "olmo2"]
)
def test_logits_equal_transformers(kit: SimpleNamespace, tmp_path: Path, twin: str) -> None:
    model = save_classifier(tmp_path, twin)
    prompts = [kit.tokens(count, seed=count).tolist() for count in (1, 7, 40)]
    with LLM(tmp_path, **OPTIONS) as llm:
        info = llm.engine.info
        assert (info.task, info.labels, info.generates) == (Task.CLASSIFY, ("bad", "fine", "good"), False)
        logits = llm.classify(prompts, activation="none")
    expected = np.stack([exact_logits(model, prompt) for prompt in prompts])
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=1e-5)


def test_every_classifier_of_transformers_is_served() -> None:
    readers = {name: family for family in FAMILIES for name in family.readers}
    served = {name for name in CLASSIFIERS.values() if hasattr(transformers, name)}
    possible = {name.replace("ForCausalLM", "ForSequenceClassification") for name in readers}
    multimodal = {"Gemma3ForSequenceClassification"}
    assert {name for name in possible if hasattr(transformers, name)} - multimodal <= served
    assert set(CLASSIFIERS) <= set(readers)


def test_results_do_not_depend_on_the_batch(kit: SimpleNamespace, tmp_path: Path) -> None:
    save_classifier(tmp_path)
    prefix = kit.tokens(50, seed=1).tolist()
    prompts = [kit.tokens(count, seed=count).tolist() for count in (1, 33, 64, 5, 90)]
    prompts += [prefix + kit.tokens(count, seed=100 + count).tolist() for count in (3, 30, 17)]
    with LLM(tmp_path, **OPTIONS, prefix_cache="none", max_running_requests=1) as llm:
        alone = np.concatenate([llm.classify([prompt]) for prompt in prompts])
    cases: list[dict[str, Any]] = [
        {},
        {"prefill_chunk_tokens": 7, "page_size": 4},
        {"prefill_chunk_tokens": 64},
    ]
    for options in cases:
        with LLM(tmp_path, **OPTIONS, check_integrity=True, **options) as llm:
            for order in (slice(None), slice(None, None, -1)):  # the second run finds cached prefixes
                scores = llm.classify(prompts[order])[order]
                np.testing.assert_allclose(scores, alone, atol=1e-6, rtol=0)
            assert not llm.engine.busy


def test_activations_are_the_models_own_or_the_requested_ones(kit: SimpleNamespace, tmp_path: Path) -> None:
    model = save_classifier(tmp_path)
    prompts = [kit.tokens(9, seed=3).tolist()]
    logits = torch.from_numpy(exact_logits(model, prompts[0]))
    with LLM(tmp_path, **OPTIONS) as llm:
        np.testing.assert_allclose(llm.classify(prompts)[0], logits.softmax(-1), atol=1e-5)
        sigmoid = llm.classify(prompts, activation="sigmoid")[0]
        np.testing.assert_allclose(sigmoid, logits.sigmoid(), atol=1e-5)
        with pytest.raises(ValueError, match="activation must be one of softmax, sigmoid, none"):
            llm.classify(prompts, activation="tanh")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="request labels or embeddings"):
            llm.generate(prompts)
        states = model.model(torch.tensor(prompts)).last_hidden_state[0, -1]
        unit = torch.nn.functional.normalize(states, dim=0).detach()
        np.testing.assert_allclose(llm.embed(prompts)[0], unit, atol=2e-5)


def test_a_reranker_has_one_label_and_a_sigmoid(kit: SimpleNamespace, tmp_path: Path) -> None:
    model = save_classifier(tmp_path, "llama", id2label={0: "LABEL_0"})
    prompt = kit.tokens(12, seed=1).tolist()
    with LLM(tmp_path, **OPTIONS) as llm:
        score = llm.classify([prompt])
    assert score.shape == (1, 1)
    np.testing.assert_allclose(score[0], 1 / (1 + np.exp(-exact_logits(model, prompt))), atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_yes_and_no_of_a_language_model_equal_transformers(
    kit: SimpleNamespace, tmp_path: Path, tied: bool
) -> None:
    """Rerankers such as Qwen3-Reranker compare the logits of two tokens after the prompt."""
    model = kit.save_model(tmp_path, "qwen3", tie_word_embeddings=tied)
    yes, no = 17, 44
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, logprob_token_ids=(yes, no))
    prompts = [kit.tokens(count, seed=count).tolist() for count in (4, 31, 90)]
    with LLM(tmp_path, **OPTIONS) as llm:
        answers = llm.generate(prompts, params)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            exact = model(torch.tensor([prompt])).logits[0, -1, [yes, no]].softmax(0).numpy()
        assert answer.logprobs is not None
        scores = np.exp(answer.logprobs[0].requested)
        np.testing.assert_allclose(scores / scores.sum(), exact, atol=1e-5)


def test_other_models_do_not_classify(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_model(tmp_path, "llama")
    with (
        LLM(tmp_path, **OPTIONS) as llm,
        pytest.raises(ValueError, match="the model has no classification head: use a model"),
    ):
        llm.classify([[1, 2]])


def test_a_checkpoint_must_have_the_head_of_its_labels(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file({**weights, "score.weight": weights["score.weight"][:2].clone()}, path, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"score\.weight has the shape \[2, 32\]"):
        LLM(tmp_path, **OPTIONS)
    weights.pop("score.weight")
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"missing: score\.weight"):
        LLM(tmp_path, **OPTIONS)


@pytest.mark.parametrize(
    ("values", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2"), "softmax"),
        ({"id2label": {"1": "b", "0": "a"}}, ("a", "b"), "softmax"),
        ({"id2label": {"0": "a"}}, ("a",), "sigmoid"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        ({"problem_type": "regression", "num_labels": 1}, ("LABEL_0",), "none"),
        (
            {
                "id2label": {"0": "a"},
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            ("a",),
            "none",
        ),
        ({"sbert_ce_default_activation_function": "torch.nn.Sigmoid"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
    ],
)
def test_labels_and_activation_are_read(
    values: dict[str, Any], labels: tuple[str, ...], activation: str
) -> None:
    fields = Fields(values)
    assert read_labels(fields) == labels
    assert read_score_activation(fields, len(labels)) == activation


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"id2label": {"1": "a"}}, "id2label must map the numbers from 0 on to texts"),
        ({"id2label": []}, "id2label must map 1 to 100000 numbers to labels"),
        ({"id2label": {"0": 7}}, "id2label must map the numbers from 0 on to texts"),
        ({"num_labels": 0}, "num_labels must be a positive integer"),
        ({"problem_type": "ranking"}, "problem_type must be one of regression"),
        ({"sbert_ce_default_activation_function": "evil.Sigmoid"}, "must name one of torch.nn.Identity"),
    ],
)
def test_invalid_labels_are_refused_by_name(tmp_path: Path, values: dict[str, Any], error: str) -> None:
    save_classifier(tmp_path)
    path = tmp_path / "config.json"
    config = {**json.loads(path.read_text()), **values}
    if "num_labels" in values:
        config["id2label"] = None
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=error):
        read_config(tmp_path)


def test_activations_are_stable_for_large_logits() -> None:
    logits = np.array([[-200.0, 0.0, 200.0]], np.float32)
    with np.errstate(over="raise"):
        assert apply_activation(logits, ScoreActivation.SIGMOID).tolist() == [[0.0, 0.5, 1.0]]
        assert apply_activation(logits, ScoreActivation.SOFTMAX).tolist() == [[0.0, 0.0, 1.0]]
