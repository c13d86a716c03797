# SPDX-License-Identifier: Apache-2.0
"""The computed bytes of weights equal those of loaded models, for all formats and for several ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from family_twins import save_twin
from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.model_setup import make_model, measure_weights
from mizzen.layers.context import BuildContext
from mizzen.layers.linear_methods.base import MeasuredWeights
from mizzen.layers.linear_methods.dequantized import DequantizedLinear
from mizzen.layers.linear_methods.quantized import choose_linear
from mizzen.layers.linear_methods.unquantized import UnquantizedLinear
from mizzen.layers.sharding import Axis, Mesh
from mizzen.models.base import DecoderModel
from mizzen.models.registry import read_config
from mizzen.models.weight_bytes import count_weight_bytes
from mizzen.quantization.online import choose_quantization
from mizzen.weights.load import fill_dummy
from quantized_formats import FORMATS
from quantized_twins import quantize_twin, save_source


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("source"))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ignored", [(), ("lm_head",)], ids=["head", "no-head"])
def test_formats_of_checkpoints(name: str, ignored: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    if not ignored and not name.startswith("ct-"):
        pytest.skip("the method quantizes no head")
    folder = quantize_twin(source, tmp_path / "twin", FORMATS[name], ignored=ignored).folder
    config, methods = read_config(folder), list[MeasuredWeights]()
    options = EngineOptions(model=str(folder), device="cpu", dtype="bfloat16")
    model = make_model(options, config, lambda done, total: None, methods=methods)
    measured, computed = sum(measure_weights(model, methods).values()), count_weight_bytes(config, 2)
    if "act-order" in name:
        assert computed <= measured, "columns in another order in each part of a merged layer need more"
    elif "tensor" in name or name == "modelopt-fp8":
        rows = 2 * (256 + 2 * 64 + 256 + 2 * 384 + 256) + config.vocab_size * (not ignored)
        assert 0 <= computed - measured <= 4 * rows, "kernels need a scale for each row"
    elif "blocks" in name or name == "fp8-ue8m0":
        assert 0 <= measured - computed < 100, "scales of blocks that a part begins inside are repeated"
    else:
        assert computed == measured


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("option", ["auto", "fp8", "int8", "w4a16"])
@pytest.mark.parametrize("family", ["granite-biases", "phi3", "cohere", "qwen2-moe", "glm4-moe"])
def test_online_quantization(family: str, option: str, ranks: int, tmp_path: Path) -> None:
    save_twin(tmp_path, family, num_attention_heads=8, num_key_value_heads=2)
    config = read_config(tmp_path)
    config = replace(config, quantization=choose_quantization(option, config.quantization))
    build = BuildContext(
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        mesh=Mesh(Axis(0, ranks)),
        make_linear=choose_linear(config.quantization, UnquantizedLinear, DequantizedLinear),
    )
    with torch.inference_mode():
        model = DecoderModel(build, config)
        fill_dummy(model.targets(), seed=0, progress=lambda done, total: None)
        model.finish()
    measured = measure_weights(model, build.methods)
    in_16_bits = sum(measured.values()) - measured.get("float32", 0) // 2
    assert in_16_bits == count_weight_bytes(config, 2, ranks), (
        "parameters in float32, which are few, count half"
    )
