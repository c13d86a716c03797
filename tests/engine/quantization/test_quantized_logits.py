# SPDX-License-Identifier: Apache-2.0
"""Logits of quantized checkpoints equal those of Transformers with the dequantized weights, in float32."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from logits_check import assert_equal
from transformers import AutoModelForCausalLM

from family_twins import save_twin
from quantized_formats import FORMATS
from quantized_twins import PART_FACTORS, QuantizedTwin, quantize_twin

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Granite with biases in its projections, and with an untied head."""
    folder = tmp_path_factory.mktemp("source")
    save_twin(folder, "granite-biases", **SIZES)
    return folder


def compute_reference(source: Path, twin: QuantizedTwin, kit: SimpleNamespace) -> torch.Tensor:
    """Return Transformers' logits of a prompt with the dequantized weights, [tokens, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return kit.oracle(twin.dequantize_into(model), kit.tokens(30, seed=1))


def compute_logits(folder: Path, kit: SimpleNamespace, **options: Any) -> torch.Tensor:
    """Return the engine's logits of the same prompt."""
    bench = kit.Bench(folder, **options)
    return bench.logits(bench.plan([], [(0, 0, kit.tokens(30, seed=1), True)], (kit.greedy(0),)))


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_those_of_the_dequantized_weights(
    name: str, source: Path, kit: SimpleNamespace, tmp_path: Path
) -> None:
    twin = quantize_twin(source, tmp_path / "twin", FORMATS[name], part_factors=PART_FACTORS)
    reference = compute_reference(source, twin, kit)
    assert reference.std() > 0.3
    assert_equal(compute_logits(twin.folder, kit), reference)
