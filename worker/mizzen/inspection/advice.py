# SPDX-License-Identifier: Apache-2.0
"""Advice on quantization for models that do not fit on a GPU, or leave little room for the KV cache."""

from __future__ import annotations

from dataclasses import replace

from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.validate import can_quantize_experts, resolve_precision
from mizzen.inspection.gpus import has_fp8_cache, has_quantized_kernels
from mizzen.models.config import ModelConfig
from mizzen.models.weight_bytes import count_weight_bytes
from mizzen.quantization.online import AS_STORED, choose_quantization

SUGGESTED = ("fp8", "w4a16")
"""Values of `--quantization` that are suggested, the one with the better quality first."""
FEW_REQUESTS = 4
"""Number of requests of full length below which an FP8 KV cache is suggested."""


def suggest_quantization(
    config: ModelConfig, options: EngineOptions, element: int, available: int, gpu: str
) -> tuple[str, int] | None:
    """Return the value of `--quantization` with which a rank's weights fit, and their bytes.

    Args:
        config: Configuration of the model.
        options: Options of the engine.
        element: Bytes of an element of unquantized weights.
        available: Bytes that weights may take on each GPU.
        gpu: Name of the GPU.

    Returns:
        The first such value; None without such a value, or if the weights are or cannot be quantized.
    """
    native = config.implementation == "native" and options.quantization == AS_STORED
    if not native or config.quantization.schemes or not has_quantized_kernels(gpu):
        return None
    if not can_quantize_experts(config):
        return None
    for name in SUGGESTED:
        quantized = replace(config, quantization=choose_quantization(name, config.quantization))
        if (size := count_weight_bytes(quantized, element, options.tensor)) <= available:
            return name, size
    return None


def can_store_fp8_cache(config: ModelConfig, options: EngineOptions, gpu: str) -> bool:
    """Return whether `--kv-cache-dtype fp8` is possible on a GPU, and not in use yet."""
    bfloat16 = options.device == "cuda" and resolve_precision(options, config) == "bfloat16"
    return bfloat16 and options.kv_cache_dtype == "auto" and has_fp8_cache(gpu)
