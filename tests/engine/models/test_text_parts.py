# SPDX-License-Identifier: Apache-2.0
"""The text parts of models for images are served, with the logits of the whole model for text."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from logits_check import assert_equal
from safetensors.torch import load_file, save_file
from vision_twins import VISION_TWINS, save_vision_twin

from mizzen.models.hf_fields import ConfigError
from mizzen.models.registry import read_config
from mizzen.models.text_part import TEXT_PARTS
from mizzen.weights.checkpoint_files import WeightsError
from quantized_formats import FORMATS
from quantized_twins import quantize_twin


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def compare(kit: SimpleNamespace, folder: Path, model: Any) -> None:
    """Compare the logits of a whole prompt, and of a prompt in two chunks, with Transformers."""
    prompt = kit.tokens(45, seed=1)
    # Transformers ignores `logit_scale` in Cohere's model for images, but applies it in the same text model.
    expected = kit.oracle(model, prompt) * getattr(model.config.get_text_config(), "logit_scale", 1.0)
    assert expected.std() > 0.3
    bench = kit.Bench(folder)
    whole = bench.logits(bench.plan([], [(0, 0, prompt, True)], (kit.greedy(0),)))
    assert_equal(whole, expected)
    first = bench.logits(bench.plan([], [(1, 0, prompt[:20], False)], (kit.greedy(1),)))
    second = bench.logits(bench.plan([], [(1, 20, prompt[20:], True)]))
    assert_equal(torch.cat((first, second)), expected)


@pytest.mark.parametrize("twin", VISION_TWINS)
def test_logits_of_text_equal_those_of_the_whole_model(
    twin: str, kit: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compare(kit, tmp_path, save_vision_twin(tmp_path, twin))
    warned = "only the text part of the model is served: images are rejected" in caplog.text
    assert warned == (read_config(tmp_path).vision is None)


@pytest.mark.parametrize("weights", ["fp8-small-blocks", "ct-w4a16-32", "modelopt-fp8"])
@pytest.mark.parametrize("twin", ["gemma3", "qwen3-vl"])
def test_text_parts_may_be_quantized(twin: str, weights: str, kit: SimpleNamespace, tmp_path: Path) -> None:
    model = save_vision_twin(tmp_path, twin)
    heads = ("lm_head", "language_model.lm_head")
    quantized = quantize_twin(tmp_path, tmp_path / "quantized", FORMATS[weights], ignored=heads)
    tensors = TEXT_PARTS[type(model).__name__].tensors
    text, count = model.model.language_model, 0
    with torch.no_grad():
        for layer, weight in quantized.dequantize().items():
            if (own := tensors.find_own_name(layer)) is not None:
                text.get_submodule(own.removeprefix("model.")).weight.copy_(weight)
                count += 1
    assert count == 7 * text.config.num_hidden_layers
    compare(kit, quantized.folder, model)


@pytest.mark.parametrize(
    ("old", "new"),
    [("language_model.model.", "model.language_model."), ("vision_tower.", "model.vision_tower.")],
)
def test_both_layouts_of_names_are_read(old: str, new: str, kit: SimpleNamespace, tmp_path: Path) -> None:
    model = save_vision_twin(tmp_path, "gemma3")
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace(old, new, 1): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    compare(kit, tmp_path, model)


def test_older_files_have_the_fields_of_the_text_part_at_the_top(
    kit: SimpleNamespace, tmp_path: Path
) -> None:
    model = save_vision_twin(tmp_path, "qwen2.5-vl")
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    text = fields.pop("text_config")
    rope = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    path.write_text(json.dumps({**text, **fields, "rope_theta": 1e4, "rope_scaling": rope}))
    compare(kit, tmp_path, model)


def test_a_tensor_of_no_known_part_is_an_error(kit: SimpleNamespace, tmp_path: Path) -> None:
    save_vision_twin(tmp_path, "mistral3")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "audio_tower.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"tensors are unexpected: audio_tower\.weight"):
        kit.Bench(tmp_path)


def test_the_head_of_the_checkpoint_is_used_if_it_differs_from_the_embedding(
    kit: SimpleNamespace, tmp_path: Path
) -> None:
    model = save_vision_twin(tmp_path, "ministral3")
    change_config(tmp_path, tie_word_embeddings=True)
    compare(kit, tmp_path, model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"text_config": {"model_type": "mistral4"}},
            "text_config: model_type must be mistral or ministral3",
        ),
        ({"text_config": {"model_type": []}}, "model_type must be mistral or ministral3"),
        ({"text_config": None}, "text_config must describe the text part"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            r"config\.json: quantization_config describes quantized weights \(HQQ\)",
        ),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    fields = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps({**fields, **changes}))
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)
