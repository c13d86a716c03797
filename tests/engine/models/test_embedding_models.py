# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of embedding models: without an LM head, or with tensor names that lack the base prefix."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mizzen import LLM
from mizzen.models.hf_fields import ConfigError
from mizzen.models.registry import read_config
from mizzen.weights.checkpoint_files import WeightsError

OPTIONS: dict[str, Any] = {"device": "cpu", "skip_tokenizer": True, "kv_cache_tokens": 512, "threads": 1}


def save_base(kit: SimpleNamespace, folder: Path, family: str) -> Any:
    """Save a random model without its head, as `AutoModel` does; return the saved model."""
    model = kit.save_model(folder, family).model
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return model


def save_pooling(folder: Path, mode: str) -> None:
    flags = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, mode: True}
    (folder / "1_Pooling").mkdir()
    noted = {"word_embedding_dimension": 32, "include_prompt": True, **flags}
    (folder / "1_Pooling/config.json").write_text(json.dumps(noted))


def states_of(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).last_hidden_state[0]


def unit(vector: torch.Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(vector, dim=0).numpy()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_model_without_a_head_only_embeds(kit: SimpleNamespace, tmp_path: Path, family: str) -> None:
    model = save_base(kit, tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert all(not name.startswith("model.") for name in load_file(tmp_path / "model.safetensors"))
    prompt = kit.tokens(20, seed=1).tolist()
    with LLM(tmp_path, **OPTIONS) as llm:
        np.testing.assert_allclose(llm.embed([prompt])[0], unit(states_of(model, prompt)[-1]), atol=2e-5)
        with pytest.raises(ValueError, match="no language-model head"):
            llm.generate([prompt])
        assert not llm.engine.info.generates


def test_tensor_names_may_lack_the_prefix_if_the_head_is_tied(kit: SimpleNamespace, tmp_path: Path) -> None:
    model = kit.save_model(tmp_path, "qwen3", tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): w for name, w in load_file(path).items()}, path, {"format": "pt"})
    prompt = kit.tokens(9, seed=2).tolist()
    with LLM(tmp_path, **OPTIONS) as llm:
        vector = llm.embed([prompt], pooling="last")[0]
        assert llm.engine.info.generates
    np.testing.assert_allclose(vector, unit(states_of(model.model, prompt)[-1]), atol=2e-5)


def test_a_tensor_under_both_names_is_reported_as_unexpected(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_model(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file({**weights, "norm.weight": weights["model.norm.weight"].clone()}, path, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"unexpected: (model\.)?norm\.weight"):
        LLM(tmp_path, **OPTIONS)


@pytest.mark.parametrize(
    ("mode", "mean"), [("pooling_mode_mean_tokens", True), ("pooling_mode_lasttoken", False)]
)
def test_the_models_own_pooling_is_the_default(
    kit: SimpleNamespace, tmp_path: Path, mode: str, mean: bool
) -> None:
    model = save_base(kit, tmp_path, "mistral")
    save_pooling(tmp_path, mode)
    prompt = kit.tokens(20, seed=3).tolist()
    states = states_of(model, prompt)
    with LLM(tmp_path, **OPTIONS) as llm:
        own, mean_of = llm.embed([prompt])[0], llm.embed([prompt], pooling="mean")[0]
    np.testing.assert_allclose(own, unit(states.mean(0) if mean else states[-1]), atol=2e-5)
    np.testing.assert_allclose(mean_of, unit(states.mean(0)), atol=2e-5)


def test_an_unsupported_pooling_must_be_overridden(kit: SimpleNamespace, tmp_path: Path) -> None:
    save_base(kit, tmp_path, "llama")
    save_pooling(tmp_path, "pooling_mode_max_tokens")
    with LLM(tmp_path, **OPTIONS) as llm:
        with pytest.raises(ValueError, match="pooling must be one of last, mean, cls"):
            llm.embed([[1, 2, 3]])
        assert llm.embed([[1, 2, 3]], pooling="mean").shape == (1, 32)


def test_bidirectional_attention_is_rejected(kit: SimpleNamespace, tmp_path: Path) -> None:
    save_base(kit, tmp_path, "qwen2")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "is_causal": False}))
    with pytest.raises(ConfigError, match="is_causal must be true"):
        read_config(tmp_path)
