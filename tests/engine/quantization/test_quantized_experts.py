# SPDX-License-Identifier: Apache-2.0
"""Logits of mixtures with quantized experts equal those of Transformers with the dequantized weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from logits_check import assert_equal
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from family_twins import save_twin
from quantized_formats import FORMATS
from quantized_twins import PART_FACTORS, QuantizedTwin, quantize_twin

ROUTERS = (".gate", ".shared_expert_gate")
"""Ends of the names of matrices that are never quantized."""
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"num_experts": 10},
    "qwen2-moe": {"shared_expert_intermediate_size": 64},
    "glm4-moe": {},
    "minimax-m2": {},
}


def save_mixture(folder: Path, name: str, *, hidden: int = 128, width: int = 128, **changes: Any) -> Any:
    return save_twin(
        folder,
        name,
        **{
            "hidden_size": hidden,
            "intermediate_size": width,
            "moe_intermediate_size": width,
            "num_hidden_layers": 2,
            "tie_word_embeddings": False,
            "mlp_only_layers": [],
            **MIXTURES[name],
            **changes,
        },
    )


def quantize_mixture(source: Path, folder: Path, name: str, **options: Any) -> QuantizedTwin:
    layers = [key.removesuffix(".weight") for key in load_file(source / "model.safetensors")]
    ignored = ("lm_head", *(layer for layer in layers if layer.endswith(ROUTERS)))
    return quantize_twin(source, folder, FORMATS[name], ignored=ignored, **options)


def compute_reference(twin: QuantizedTwin, folder: Path, kit: SimpleNamespace) -> torch.Tensor:
    """Return Transformers' logits of a prompt with the dequantized weights, [tokens, vocab]."""
    twin.save_dequantized(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return kit.oracle(model, kit.tokens(30, seed=1))


def compute_logits(folder: Path, kit: SimpleNamespace, **options: Any) -> torch.Tensor:
    """Return the engine's logits of the same prompt."""
    bench = kit.Bench(folder, **options)
    return bench.logits(bench.plan([], [(0, 0, kit.tokens(30, seed=1), True)], (kit.greedy(0),)))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    save_mixture(folder, "qwen3-moe", num_hidden_layers=1)
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_those_of_the_dequantized_weights(
    name: str, source: Path, kit: SimpleNamespace, tmp_path: Path
) -> None:
    twin = quantize_mixture(source, tmp_path / "twin", name, part_factors=PART_FACTORS)
    assert sum(".experts." in layer for layer in twin.layers) == 30
    reference = compute_reference(twin, tmp_path / "exact", kit)
    assert reference.std() > 0.3
    assert_equal(compute_logits(twin.folder, kit), reference)
