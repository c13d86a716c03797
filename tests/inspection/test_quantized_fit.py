# SPDX-License-Identifier: Apache-2.0
"""Memory of quantized weights in inspections, and advice on quantization."""

from __future__ import annotations

from typing import Any

import pytest

from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.memory_need import DEQUANTIZED_BYTES
from mizzen.inspection.gpus import GIB, gpu_bytes
from mizzen.inspection.inspect_model import Inspection, inspect_model
from mizzen.inspection.model_files import ModelFiles
from mizzen.inspection.text import format_inspection
from mizzen.models.hf_fields import ConfigError, Fields

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LINEAR = 36 * ((4096 + 2 * 1024) * 4096 + 4096 * 4096 + 3 * 4096 * 12288)
OTHERS = 2 * (8_190_735_360 - LINEAR)
"""Bytes of embedding, head and norms in bfloat16."""


def inspect(gpu: str, *, quantized: dict[str, Any] | None = None, **options: Any) -> Inspection:
    config = {**QWEN3_8B, **({"quantization_config": quantized} if quantized else {})}
    memory = gpu_bytes(gpu)
    named = f"{memory / GIB:.1f} GiB" + ("" if gpu[0].isdigit() else f" ({gpu})")
    return inspect_model(
        ModelFiles(name="m", fields=Fields(config)),
        EngineOptions(model="m", **options),
        tensors=(1,),
        gpu=named,
        memory=memory,
    )


@pytest.mark.parametrize(
    ("source", "linear_bytes"),
    [
        ({"quantized": AWQ}, LINEAR // 2 + LINEAR // 128 * 3),
        ({"quantized": FP8_BLOCKS}, LINEAR + LINEAR // 128**2 * 4),
        ({"quantization": "w4a16"}, LINEAR // 2 + LINEAR // 128 * 2),
    ],
    ids=["awq", "fp8-blocks", "w4a16"],
)
def test_codes_scales_and_zero_points_count(source: dict[str, Any], linear_bytes: int) -> None:
    result = inspect("h100", **source)
    assert result.weight_bytes == OTHERS + linear_bytes == result.memory_fits[0].weight_bytes
    assert result.tensor_sizes[0].weight_bytes == result.weight_bytes
    assert result.parameters == 8_190_735_360
    text = format_inspection(result)
    assert f"in memory     {result.weight_bytes / GIB:.1f} GiB of weights" in text
    assert f"quantization  {result.quantization}" in text


def test_quantized_weights_leave_more_room_for_the_kv_cache() -> None:
    plain, online = (inspect("24", quantization=name).memory_fits[0] for name in ("auto", "w4a16"))
    # Eager steps and graphs have temporary matrices of their own.
    saved = plain.weight_bytes - online.weight_bytes - 2 * DEQUANTIZED_BYTES
    assert online.kv_bytes - plain.kv_bytes == pytest.approx(saved, rel=0.01)


def test_weights_that_do_not_fit_may_fit_quantized() -> None:
    fits = {gpu: inspect(gpu).memory_fits[0].message for gpu in ("16", "9", "4", "a10", "h100")}
    assert fits["16"].endswith("or quantized weights: --quantization fp8 needs 8.8 GiB for them")
    assert fits["9"].endswith("or quantized weights: --quantization w4a16 needs 5.7 GiB for them")
    assert "quantiz" not in fits["4"] + fits["h100"]
    assert "quantiz" not in inspect("16", quantized=FP8_BLOCKS, context_length=40960).memory_fits[0].message
    assert "quantiz" not in inspect("a10", context_length=40960).memory_fits[0].message, "it has no kernels"


def test_an_fp8_cache_is_suggested_if_few_requests_fit() -> None:
    result = inspect("24")
    (fit,) = result.memory_fits
    assert fit.fits
    assert fit.advice == f"--kv-cache-dtype fp8 makes room for {2 * fit.kv_tokens:,} tokens"
    assert f"  with --tensor 1, {fit.advice}" in format_inspection(result)
    for gpu, options in (
        ("h200", {}),
        ("24", {"kv_cache_dtype": "fp8"}),
        ("24", {"dtype": "float16"}),
        ("a10", {}),
    ):
        assert inspect(gpu, **options).memory_fits[0].advice == ""


def test_quantized_weights_are_not_quantized_again() -> None:
    with pytest.raises(ConfigError, match="--quantization fp8 quantizes unquantized weights"):
        inspect("h100", quantized=AWQ, quantization="fp8")
