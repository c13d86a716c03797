# SPDX-License-Identifier: Apache-2.0
"""Quantized copies of tiny checkpoints: their files, their exact weights, and their variants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from family_twins import save_twin
from quantized_formats import FORMATS
from quantized_twins import FILE, PART_FACTORS, QuantizedTwin, quantize_twin

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
GATE = "model.layers.0.mlp.gate_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny Granite with untied head: its folder, and its model of Transformers."""
    folder = tmp_path_factory.mktemp("source")
    return folder, save_twin(folder, "granite", dtype=torch.bfloat16, tie_word_embeddings=False, **SIZES)


def quantize(source: tuple[Path, Any], tmp_path: Path, name: str, **options: Any) -> QuantizedTwin:
    return quantize_twin(source[0], tmp_path / "quantized", FORMATS[name], **options)


@pytest.mark.parametrize("name", FORMATS)
def test_all_linear_layers_but_the_head_are_quantized(
    name: str, source: tuple[Path, Any], tmp_path: Path
) -> None:
    twin = quantize(source, tmp_path, name)
    original, stored = load_file(source[0] / FILE), load_file(twin.folder / FILE)
    linear = [name for name, part in source[1].named_modules() if isinstance(part, torch.nn.Linear)]
    assert sorted([*twin.layers, "lm_head"]) == sorted(linear)
    assert torch.equal(stored["lm_head.weight"], original["lm_head.weight"])
    for layer, rounded in twin.dequantize().items():
        expected = original[f"{layer}.weight"].float()
        assert rounded.shape == expected.shape
        cosine = torch.nn.functional.cosine_similarity(rounded.flatten(), expected.flatten(), dim=0)
        assert cosine > 0.99, layer
        weight = stored.get(f"{layer}.weight")
        assert weight is None or weight.element_size() == 1


@pytest.mark.parametrize(("name", "method"), [("fp8-blocks", "fp8"), ("gptq", "gptq"), ("awq", "awq")])
def test_config_describes_the_format(
    name: str, method: str, source: tuple[Path, Any], tmp_path: Path
) -> None:
    twin = quantize(source, tmp_path, name)
    config = json.loads((twin.folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == method and config["hidden_size"] == 128


def test_modelopt_has_a_file_of_its_own_and_scales_of_the_kv_cache(
    source: tuple[Path, Any], tmp_path: Path
) -> None:
    twin = quantize(source, tmp_path, "modelopt-fp8")
    assert "quantization_config" not in json.loads((twin.folder / "config.json").read_text())
    description = json.loads((twin.folder / "hf_quant_config.json").read_text())
    assert description["quantization"]["exclude_modules"] == ["lm_head"]
    assert 0 < float(twin.tensors("model.layers.0.self_attn.k_proj")["k_scale"]) < 1
    assert "k_scale" not in twin.tensors("model.layers.0.self_attn.v_proj")


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-small-blocks", "fp8-ue8m0"])
def test_transformers_dequantizes_fp8_blocks_alike(
    name: str, source: tuple[Path, Any], tmp_path: Path
) -> None:
    twin = quantize(source, tmp_path, name)
    dequantize = Fp8Dequantize(None)._dequantize_one
    for layer, weight in twin.dequantize().items():
        tensors = twin.tensors(layer)
        theirs = dequantize(tensors["weight"], tensors["weight_scale_inv"], torch.float32)
        assert torch.equal(theirs, weight), layer


@pytest.mark.parametrize("name", ["gptq-act-order", "fp8-tensor", "ct-int8"])
def test_dequantized_model_gives_other_but_near_logits(
    name: str, source: tuple[Path, Any], tmp_path: Path
) -> None:
    twin = quantize(source, tmp_path, name)
    plain = AutoModelForCausalLM.from_pretrained(source[0], dtype=torch.float32)
    tokens = torch.arange(2, 14)[None]
    with torch.no_grad():
        before = plain(tokens).logits
        after = twin.dequantize_into(plain)(tokens).logits
    difference = float((after - before).norm() / before.norm())
    assert 0 < difference < (0.3 if "gptq" in name else 0.1)


def test_parts_can_have_scales_of_very_different_size(source: tuple[Path, Any], tmp_path: Path) -> None:
    twin = quantize(source, tmp_path, "ct-fp8-tensor", part_factors=PART_FACTORS)
    prefix = "model.layers.0.self_attn."
    q, k, v = (float(twin.tensors(prefix + part)["weight_scale"]) for part in ("q_proj", "k_proj", "v_proj"))
    assert 5 < k / q < 20 and 0.005 < v / q < 0.02


def test_checkpoints_can_be_damaged(source: tuple[Path, Any], tmp_path: Path) -> None:
    twin = quantize(source, tmp_path, "ct-fp8-channel-f32")
    twin.set_scale(GATE, 1e-30)
    twin.set_scale(GATE, 0.0, index=1)
    twin.set_weight_code(GATE, 0x7F, index=5 * 128 + 3)
    weight = twin.dequantize()[GATE]
    assert weight[0].abs().max() < 1e-27 and not weight[1].any()
    assert np.argwhere(weight.isnan().numpy()).tolist() == [[5, 3]]
    twin.edit(f"{GATE}.weight_scale", lambda scale: None)
    assert set(twin.tensors(GATE)) == {"weight"}


def test_other_layers_can_be_ignored_and_the_head_quantized(source: tuple[Path, Any], tmp_path: Path) -> None:
    twin = quantize(source, tmp_path, "gptq", ignored=(GATE,))
    config = json.loads((twin.folder / "config.json").read_text())["quantization_config"]
    assert config["lm_head"] is True and config["dynamic"] == {f"-:^{GATE}$": {}}
    assert "lm_head" in twin.layers and GATE not in twin.layers
    assert twin.tensors(GATE)["weight"].dtype == torch.bfloat16
