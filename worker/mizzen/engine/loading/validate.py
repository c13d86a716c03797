# SPDX-License-Identifier: Apache-2.0
"""Checks engine options against a model's config.json, without importing torch.

The loader and `mizzen check` use it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from mizzen.engine.config import EngineOptions
from mizzen.layers.sharding import check_shardable, choose_expert_groups
from mizzen.models.config import ModelConfig
from mizzen.models.registry import READERS
from mizzen.models.transformers_backend.installed import check_installed
from mizzen.quantization.online import AS_STORED, choose_quantization


def resolve_precision(options: EngineOptions, config: ModelConfig) -> str:
    """Return the data type of unquantized weights and activations, by its name in torch (such as "bfloat16").

    On GPUs, `auto` is bfloat16 for quantized weights, whose kernels compute in bfloat16, even if the
    checkpoint was saved in float16, as many in AWQ and GPTQ were.
    """
    if options.dtype != "auto":
        return options.dtype
    if options.device != "cuda":
        return "float32"
    return "bfloat16" if has_quantized_weights(options, config) else config.dtype


def has_quantized_weights(options: EngineOptions, config: ModelConfig) -> bool:
    """Return whether the model has quantized weights, in its checkpoint or once they are loaded."""
    return bool(config.quantization.schemes) or options.quantization != AS_STORED


def can_quantize_experts(config: ModelConfig) -> bool:
    """Return whether a model has no experts, or experts that can be quantized while they are loaded."""
    return config.experts is None or not (config.experts.biases or config.experts.interleaved)


def check_model(options: EngineOptions, config: ModelConfig) -> None:
    """Check that a model can be served with the options.

    Raises:
        ValueError: The model does not support an option; the message names it and what to use instead.
    """
    if config.encoder is not None:
        check_encoder(options, config)
        return
    quantized = replace(config, quantization=choose_quantization(options.quantization, config.quantization))
    if options.quantization != AS_STORED and not can_quantize_experts(config):
        raise ValueError(
            f"--quantization {options.quantization} is not supported for experts with biases "
            f"({config.architecture}): use {AS_STORED}, which keeps their weights as they are stored"
        )
    if config.experts is None and options.expert not in (None, 1):
        raise ValueError(
            f"--expert {options.expert} divides the experts of a native mixture among ranks, and this model "
            "has none: leave it out"
        )
    if config.implementation == "native":
        check_shardable(config, options.tensor, options.expert)
        choose_expert_groups(quantized, options.tensor, options.expert)
    else:  # the engine checks the layers when it has built them
        check_installed(config.architecture, READERS)
    check_context_length(options, config)
    if options.kv_cache_dtype == "fp8" and (
        options.device != "cuda" or resolve_precision(options, config) != "bfloat16"
    ):
        raise ValueError("--kv-cache-dtype fp8 needs --device cuda and --dtype bfloat16: use auto here")


def check_encoder(options: EngineOptions, config: ModelConfig) -> None:
    """Check that an encoder can be served with the options.

    Raises:
        ValueError: The model does not support an option; the message names it and what to use instead.
    """
    if options.tensor > 1:
        raise ValueError(
            f"--tensor {options.tensor} is not supported for encoders ({config.architecture}): use "
            "--tensor 1, and several engines for more throughput"
        )
    if options.kv_cache_tokens is not None:
        raise ValueError(
            f"--kv-cache-tokens has no effect on encoders ({config.architecture}), which have no KV cache: "
            "leave it out"
        )
    unsupported = {
        "--quantization": (options.quantization, AS_STORED),
        "--kv-cache-dtype": (options.kv_cache_dtype, "auto"),
    }
    for option, (value, supported) in unsupported.items():
        if value != supported:
            raise ValueError(
                f"{option} {value} is not supported for encoders ({config.architecture}): use {supported}"
            )
    check_context_length(options, config)


def check_context_length(options: EngineOptions, config: ModelConfig) -> None:
    """Check that `--context-length` is at most the model's limit.

    Raises:
        ValueError: It is larger.
    """
    if options.context_length is not None and options.context_length > config.context_length:
        raise ValueError(
            f"--context-length {options.context_length} exceeds the model's max_position_embeddings "
            f"({config.context_length}): lower it"
        )


def make_trace_folder(folder: Path) -> None:
    """Create the folder of --profile if it does not exist.

    Raises:
        ValueError: The folder cannot be created, or is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--profile {folder} is not a writable folder: {error}") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--profile {folder} is not a writable folder")
