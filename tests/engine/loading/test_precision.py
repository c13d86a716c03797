# SPDX-License-Identifier: Apache-2.0
"""The data type of activations: `--dtype auto` is bfloat16 for quantized weights on GPUs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.model_setup import log_precision
from mizzen.engine.loading.resolve import resolve_dtype
from mizzen.models.config import ModelConfig
from mizzen.models.hf_fields import Fields
from mizzen.models.registry import read_model

FIELDS: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "torch_dtype": "float16",
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}


def read(quantized: dict[str, Any] | None) -> ModelConfig:
    return read_model(Fields({**FIELDS, **({"quantization_config": quantized} if quantized else {})}))


@pytest.mark.parametrize(
    ("quantized", "options", "expected"),
    [
        (AWQ, {}, torch.bfloat16),
        (GPTQ, {}, torch.bfloat16),
        (None, {"quantization": "w4a16"}, torch.bfloat16),
        (None, {}, torch.float16),
        (AWQ, {"dtype": "float16"}, torch.float16),
        (AWQ, {"device": "cpu"}, torch.float32),
    ],
)
def test_quantized_weights_are_computed_in_bfloat16(
    quantized: dict[str, Any] | None, options: dict[str, Any], expected: torch.dtype
) -> None:
    assert resolve_dtype(EngineOptions(model="m", **options), read(quantized)) == expected


@pytest.mark.parametrize(("options", "logged"), [({}, True), ({"dtype": "bfloat16"}, False)])
def test_another_precision_than_the_checkpoints_is_logged(
    options: dict[str, Any], logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = read(AWQ)
    chosen = EngineOptions(model="m", **options)
    with caplog.at_level(logging.INFO):
        log_precision(chosen, config, resolve_dtype(chosen, config))
    assert ("computes in bfloat16" in caplog.text and "saved in float16" in caplog.text) == logged
