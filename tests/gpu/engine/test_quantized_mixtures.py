# SPDX-License-Identifier: Apache-2.0
"""Mixtures with quantized experts on a GPU: log probabilities equal those of Transformers with the
dequantized weights, in formats whose inputs are unquantized in all layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hopper import on_hopper
from logprob_check import SIZES, measure_errors

from family_twins import save_random_model
from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.model_setup import make_model
from mizzen.layers.experts.quantized_kernel_product import GroupedQuantizedProduct
from mizzen.models.registry import read_config
from quantized_mixtures import quantize_mixture

pytestmark = on_hopper("sgl_kernel", "sglang-kernel")
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 128,
    "head_dim": 64,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, num_hidden_layers=2, tie_word_embeddings=False)
    save_random_model(folder, transformers.Qwen3MoeForCausalLM, config, torch.bfloat16, plus_one=False)
    return folder


@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        ("modelopt-fp8-blocks", "auto"),
        ("modelopt-fp8-blocks", "off"),
        ("fp8-small-blocks", "auto"),
        ("ct-int8-asymmetric", "auto"),
        ("awq", "auto"),
        ("gptq-act-order", "auto"),
        ("ct-w4a16-asymmetric", "off"),
        ("ct-w8a16", "auto"),
    ],
)
def test_log_probabilities_equal_the_dequantized_model(
    name: str, graphs: str, source: Path, tmp_path: Path
) -> None:
    """A rounding error may choose another expert, which changes single values by much more than the mean."""
    twin = quantize_mixture(source, tmp_path / "twin", name)
    twin.save_dequantized(tmp_path / "exact")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=torch.float32)
    measure_errors(model.cuda().eval(), twin.folder, cuda_graph=graphs).check_means()


def test_experts_stay_quantized_in_memory(source: Path, tmp_path: Path) -> None:
    folder = quantize_mixture(source, tmp_path / "twin", "fp8-blocks").folder
    options = EngineOptions(model=str(folder), device="cuda", dtype="bfloat16")
    model: Any = make_model(options, read_config(folder), lambda done, total: None)
    mixture = model.layers[0].mlp.down
    assert isinstance(mixture.product, GroupedQuantizedProduct)
    assert mixture.weights.gate_up.weight.values.dtype == torch.float8_e4m3fn
