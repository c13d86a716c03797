# SPDX-License-Identifier: Apache-2.0
"""Rows that are only pooled compute no logits and sample nothing, and share cached prefixes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_llm import open_llm, prompt_tokens, record_plans

from encoders.twins import embed_alone, save_encoder
from mizzen import LLM
from mizzen.core.request import Pooling
from mizzen.models.hf_fields import ConfigError
from mizzen.models.pooling.modules import read_modules
from mizzen.models.registry import read_config
from mizzen.weights.checkpoint_files import WeightsError


def states_of(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model.model(torch.tensor([prompt])).last_hidden_state[0]


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_pooled_prompts_compute_no_logits_and_share_a_pass(
    model: Any, kit: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pooling: str
) -> None:
    prompts = [kit.tokens(count, seed=count).tolist() for count in (3, 40, 17, 9)]
    with open_llm(tmp_path) as llm:
        step = llm.engine._loop._runner.step  # type: ignore[attr-defined]
        monkeypatch.setattr(step.model, "logits", lambda *_: pytest.fail("logits were computed"))
        plans = record_plans(llm)
        vectors = llm.embed(prompts, pooling=pooling, normalize=False)  # type: ignore[arg-type]
    assert [plan.samples for plan in plans] == [0]
    assert len(plans[0].prefill) == len(prompts)
    pooled = {"last": lambda s: s[-1], "mean": lambda s: s.mean(0), "cls": lambda s: s[0]}[pooling]
    expected = torch.stack([pooled(states_of(model, prompt)) for prompt in prompts])
    np.testing.assert_allclose(vectors, expected.numpy(), atol=2e-5)


def test_a_shared_prefix_is_computed_once(model: Any, kit: SimpleNamespace, tmp_path: Path) -> None:
    query = kit.tokens(160, seed=1).tolist()
    prompts = [query + kit.tokens(count, seed=count).tolist() for count in range(5, 13)]
    with open_llm(tmp_path) as llm:
        plans = record_plans(llm)
        vectors = llm.embed(prompts)
        computed = prompt_tokens(plans)
        assert computed == len(query) + sum(range(5, 13))
        llm.embed(prompts, pooling="mean")  # needs the states of all tokens
        assert prompt_tokens(plans) - computed == sum(map(len, prompts))
    expected = [torch.nn.functional.normalize(states_of(model, prompt)[-1], dim=0) for prompt in prompts]
    np.testing.assert_allclose(vectors, torch.stack(expected).numpy(), atol=2e-5)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_chunks_and_batches_do_not_change_vectors(
    model: Any, kit: SimpleNamespace, tmp_path: Path, pooling: Any
) -> None:
    prompts = [kit.tokens(count, seed=count).tolist() for count in (1, 33, 64, 5, 90)]
    prompts.append(prompts[4][:50] + prompts[1])
    with open_llm(tmp_path, max_running_requests=1, prefix_cache="none") as llm:
        alone = llm.embed(prompts, pooling=pooling)
    with open_llm(tmp_path, prefill_chunk_tokens=7) as llm:
        for order in (slice(None), slice(None, None, -1)):
            vectors = llm.embed(prompts[order], pooling=pooling)[order]
            np.testing.assert_allclose(vectors, alone, atol=1e-6, rtol=0)


def save_modules(folder: Path, *kinds: str, pooling: str = "pooling_mode_mean_tokens") -> None:
    """Save the configuration of modules of sentence-transformers; `kinds` follow the transformer."""
    paths = [f"{index}_{kind}" for index, kind in enumerate(kinds, 1)]
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(zip(("Transformer", *kinds), ("", *paths), strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    for kind, path in zip(kinds, paths, strict=True):
        (folder / path).mkdir()
        if kind == "Pooling":
            (folder / path / "config.json").write_text(json.dumps({pooling: True}))


def save_dense(folder: Path, inputs: int, outputs: int, activation: str) -> torch.nn.Linear:
    torch.manual_seed(inputs + outputs)
    linear = torch.nn.Linear(inputs, outputs)
    config = {"in_features": inputs, "out_features": outputs, "bias": True, "activation_function": activation}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"linear.weight": linear.weight.data, "linear.bias": linear.bias.data}
    save_file(tensors, folder / "model.safetensors")
    return linear


def test_dense_modules_follow_the_pooling(model: Any, kit: SimpleNamespace, tmp_path: Path) -> None:
    save_modules(tmp_path, "Pooling", "Dense", "Dense", "Normalize")
    first = save_dense(tmp_path / "2_Dense", 32, 48, "torch.nn.modules.activation.Tanh")
    second = save_dense(tmp_path / "3_Dense", 48, 10, "torch.nn.modules.linear.Identity")
    prompts = [kit.tokens(count, seed=count).tolist() for count in (3, 21)]
    with open_llm(tmp_path) as llm:
        assert llm.engine.info.pooling == "mean"
        vectors = llm.embed(prompts)
    means = torch.stack([states_of(model, prompt).mean(0) for prompt in prompts])
    expected = torch.nn.functional.normalize(second(torch.tanh(first(means))), dim=1).detach()
    assert vectors.shape == (2, 10)
    np.testing.assert_allclose(vectors, expected.numpy(), atol=2e-5)
    save_dense(tmp_path / "3_Dense", 47, 10, "torch.nn.modules.linear.Identity")
    with pytest.raises(WeightsError, match="in_features is 47, but its inputs have 48 elements"):
        open_llm(tmp_path)
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"2_Dense/model\.safetensors cannot be read"):
        open_llm(tmp_path)


def test_dense_modules_follow_the_pooling_of_encoders(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "Bert")
    save_modules(tmp_path, "Pooling", "Dense", pooling="pooling_mode_cls_token")
    size = model.config.hidden_size
    linear = save_dense(tmp_path / "2_Dense", size, 5, "torch.nn.modules.activation.Tanh")
    prompts = [[5, 9, 7], list(range(4, 20))]
    with LLM(tmp_path, device="cpu", skip_tokenizer=True, threads=1) as llm:
        vectors = llm.embed(prompts)
    states = torch.stack([embed_alone(model, prompt, Pooling.CLS) for prompt in prompts])
    expected = torch.nn.functional.normalize(torch.tanh(linear(states)), dim=1).detach()
    np.testing.assert_allclose(vectors, expected.numpy(), atol=2e-5)
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with LLM(tmp_path, device="cpu", skip_tokenizer=True, threads=1, load_format="dummy") as llm:
        assert llm.embed(prompts).shape == (2, size)
    modules = tmp_path / "modules.json"
    modules.write_text(modules.read_text().replace("Dense", "LayerNorm"))
    with pytest.raises(ConfigError, match="the module LayerNorm is not supported"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("kinds", "error"),
    [
        (("Pooling", "LayerNorm"), "the module LayerNorm is not supported here"),
        (("Pooling", "Normalize", "Dense"), "the module Dense is not supported here"),
        (("Dense", "Pooling"), "the module Pooling is not supported here"),
    ],
)
def test_unsupported_modules_are_refused_by_name(tmp_path: Path, kinds: tuple[str, ...], error: str) -> None:
    save_modules(tmp_path, *kinds)
    for path in tmp_path.glob("*_Dense"):
        save_dense(path, 32, 32, "torch.nn.modules.activation.Tanh")
    with pytest.raises(ConfigError, match=error):
        read_modules(tmp_path)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"activation_function": "torch.nn.modules.activation.Mish"}, "activation_function must name one of"),
        ({"activation_function": "os.Tanh"}, "activation_function must name one of"),
        ({"module_input_name": "token_embeddings"}, "module_input_name must be sentence_embedding"),
        ({"in_features": None}, "in_features must be a positive integer"),
    ],
)
def test_invalid_dense_modules_are_refused(tmp_path: Path, change: dict[str, Any], error: str) -> None:
    save_modules(tmp_path, "Pooling", "Dense")
    path = tmp_path / "2_Dense"
    save_dense(path, 32, 32, "torch.nn.modules.activation.Tanh")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match=error):
        read_modules(tmp_path)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_max_tokens": True}, "max_tokens"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls_token+mean_tokens"),
        ({}, "none"),
    ],
)
def test_pooling_is_read_or_named(tmp_path: Path, pooling: dict[str, Any], expected: str) -> None:
    save_modules(tmp_path, "Pooling")
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    assert read_modules(tmp_path).pooling == expected
    (tmp_path / "modules.json").unlink()
    assert read_modules(tmp_path).pooling == expected


def test_a_missing_configuration_of_a_module_is_named(tmp_path: Path) -> None:
    save_modules(tmp_path, "Pooling", "Dense")
    with pytest.raises(ConfigError, match=r"2_Dense/config\.json is missing, although modules\.json names"):
        read_modules(tmp_path)


def test_modules_outside_the_folder_are_refused(tmp_path: Path) -> None:
    entries = [{"type": "sentence_transformers.models.Pooling", "path": "../other"}]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match="outside the model's folder"):
        read_modules(tmp_path)
