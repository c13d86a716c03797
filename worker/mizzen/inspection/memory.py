# SPDX-License-Identifier: Apache-2.0
"""Computes which contexts fit into the memory of GPUs, with the engine's own estimate of a step."""

from __future__ import annotations

import msgspec

from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.memory_need import MemoryNeed
from mizzen.engine.loading.validate import resolve_precision
from mizzen.inspection.advice import FEW_REQUESTS, can_store_fp8_cache, suggest_quantization
from mizzen.inspection.gpus import GIB
from mizzen.inspection.model_files import WeightFiles
from mizzen.models.config import ModelConfig
from mizzen.models.parameters import count_parameters
from mizzen.models.weight_bytes import count_weight_bytes

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
RESERVED_BYTES = 256 << 20
"""Minimum number of bytes that every rank needs in addition to its weights, for CUDA and a step."""
ROUNDED_UP = 0.9995
"""Share of a unit from which a number with three digits is rounded up to the unit."""
MORE_GPUS = "use more GPUs (--tensor) or GPUs with more memory"
LARGER_GPU = "use a GPU with more memory"
"""Remedy for models that several GPUs cannot share."""


class MemoryFit(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Memory of one GPU of a group, in bytes, and the KV cache that fits.

    Attributes:
        tensor: number of GPUs that share the model.
        weight_bytes: weights of one rank.
        step_bytes: estimate of the largest step of one rank, with its CUDA graphs and the CUDA context.
        kv_bytes: KV cache of one rank; 0 if none fits.
        kv_tokens: tokens that fit into the KV cache.
        longest_request: maximum number of prompt and output tokens of one request.
        full_requests: number of requests with the full context that fit together.
        fits: whether the engine can start.
        message: needed and available memory, with a remedy if the model does not fit.
        advice: option that makes room for more requests, if the KV cache holds few; otherwise empty.
    """

    tensor: int
    weight_bytes: int
    step_bytes: int
    kv_bytes: int
    kv_tokens: int
    longest_request: int
    full_requests: int
    fits: bool
    message: str
    advice: str = ""


def element_bytes(config: ModelConfig, options: EngineOptions) -> int:
    """Return the number of bytes of an element of the weights and activations."""
    return ELEMENT_BYTES[resolve_precision(options, config)]


def estimate_need(config: ModelConfig, options: EngineOptions) -> MemoryNeed:
    """Return the engine's estimate of what KV and the largest step need on each of `options.tensor` ranks."""
    element = element_bytes(config, options)
    if config.encoder is not None:
        return MemoryNeed.estimate_encoder(config, options, element)
    return MemoryNeed.estimate(config, options, element, 1 if options.kv_cache_dtype == "fp8" else element)


def count_loaded(config: ModelConfig, weights: WeightFiles | None, ranks: int = 1) -> int:
    """Return the number of parameters that one of `ranks` ranks loads; 0 if it is unknown.

    If Transformers implements the model, its files tell the number. If their headers are unknown, it is
    derived from the size of the files and the data type in config.json. Without files, it is known if the
    model's code was checked, or if it is a known mixture of experts.
    """
    if config.implementation == "native":
        return count_parameters(config, ranks)
    if weights is None:
        return -(-config.transformers_parameters // ranks)
    return -(-(sum(weights.elements.values()) or weights.size // ELEMENT_BYTES[config.dtype]) // ranks)


def measure_loaded(config: ModelConfig, weights: WeightFiles | None, options: EngineOptions) -> int:
    """Return the bytes of the weights on one of `options.tensor` ranks; 0 if they are unknown.

    If Transformers implements the model, `--quantization` is not taken into account, because it is not known
    which layers can be quantized.
    """
    element = element_bytes(config, options)
    if config.implementation == "native":
        return count_weight_bytes(config, element, options.tensor)
    return count_loaded(config, weights, options.tensor) * element


def count_active(config: ModelConfig, loaded: int) -> int:
    """Return the number of parameters that one token uses; 0 if it is unknown.

    Args:
        config: Configuration of the model.
        loaded: Number of parameters that are loaded; 0 if it is unknown.
    """
    if config.implementation == "native":
        return count_parameters(config, active=True)
    return 0 if config.expert_width else loaded


def describe_need(parameters: str, tensor: int, needed: float, available: float, share: str) -> str:
    """Return the sentence about the memory of each GPU; `share` names the part that the engine may use."""
    gpus = f"{tensor} GPU" if tensor == 1 else f"{tensor} GPUs"
    return (
        f"{parameters} parameters on {gpus} need at least {format_gib(needed)} of each, and may use "
        f"{format_gib(available)}: {share}"
    )


def fit_memory(
    config: ModelConfig,
    weights: WeightFiles | None,
    options: EngineOptions,
    memory: int,
    *,
    name: str,
    context: int | None = None,
    image_bytes: int = 0,
) -> MemoryFit:
    """Return the contexts that fit if `options.tensor` GPUs share a model.

    Args:
        config: Configuration of the model, which can be sharded over these GPUs.
        weights: Files of the weights; None without such files.
        options: Options of the engine.
        memory: Memory of one GPU in bytes.
        name: Name of this memory for the message, such as "80 GiB".
        context: Wanted number of prompt and output tokens of a request; the model's limit by default.
        image_bytes: Memory for images besides the weights of their encoder.
    """
    if config.encoder is not None:
        return fit_encoder(config, weights, options, memory, name=name, context=context)
    ranks = options.tensor
    weight_bytes = measure_loaded(config, weights, options)
    need = estimate_need(config, options)
    step = need.step_bytes + need.graph_bytes + RESERVED_BYTES + image_bytes
    available = int(memory * options.memory_fraction)
    page_bytes = options.page_size * need.token_bytes
    pages = max(0, available - weight_bytes - step) // page_bytes
    tokens = pages * options.page_size
    limit = context or config.context_length
    share = f"{options.memory_fraction} of {name}"
    remedy = LARGER_GPU if config.expert_width else MORE_GPUS
    most = available - (RESERVED_BYTES if weight_bytes + RESERVED_BYTES > available else step)
    if quantized := suggest_quantization(config, options, element_bytes(config, options), most, name):
        option, size = quantized
        remedy += f", or quantized weights: --quantization {option} needs {format_gib(size)} for them"
    message = describe_need(
        format_count(count_loaded(config, weights)), ranks, weight_bytes + RESERVED_BYTES, available, share
    )
    fits = tokens >= limit if context else tokens >= 2
    if weight_bytes + RESERVED_BYTES > available:
        message = f"{message}; {remedy}"
    elif tokens < 2:
        message = (
            f"{message}; a step needs {format_gib(step)} of it, so that no memory is left for the KV cache: "
            f"{remedy}, or lower --prefill-chunk-tokens or --max-running-requests"
        )
    elif tokens < limit:
        message = (
            f"{message}; the KV cache holds {tokens:,} tokens, less than one request of {limit:,} tokens"
            + (f": {remedy}, or lower --context-length" if context else "")
        )
    return MemoryFit(
        tensor=ranks,
        weight_bytes=weight_bytes,
        step_bytes=step,
        kv_bytes=pages * page_bytes,
        kv_tokens=tokens,
        longest_request=min(tokens, limit),
        full_requests=tokens // limit,
        fits=fits,
        message=message,
        advice=suggest_cache(config, options, tokens, limit, name) if tokens >= 2 else "",
    )


def fit_encoder(
    config: ModelConfig,
    weights: WeightFiles | None,
    options: EngineOptions,
    memory: int,
    *,
    name: str,
    context: int | None,
) -> MemoryFit:
    """Return whether an encoder, which has no KV cache, fits on a GPU; see `fit_memory` for arguments."""
    weight_bytes = measure_loaded(config, weights, options)
    step = estimate_need(config, options).step_bytes + RESERVED_BYTES
    available = int(memory * options.memory_fraction)
    share = f"{options.memory_fraction} of {name}"
    needed = weight_bytes + step
    message = describe_need(format_count(count_loaded(config, weights)), 1, needed, available, share)
    if needed > available:
        message += f"; {LARGER_GPU}, or lower --prefill-chunk-tokens or --context-length"
    return MemoryFit(
        tensor=1,
        weight_bytes=weight_bytes,
        step_bytes=step,
        kv_bytes=0,
        kv_tokens=0,
        longest_request=context or config.context_length,
        full_requests=0,
        fits=needed <= available,
        message=message,
    )


def suggest_cache(config: ModelConfig, options: EngineOptions, tokens: int, limit: int, gpu: str) -> str:
    """Return the advice to use an FP8 KV cache, if it pays; otherwise nothing.

    Args:
        config: Configuration of the model.
        options: Options of the engine.
        tokens: Tokens that fit into the KV cache.
        limit: Number of tokens of a request of full length.
        gpu: Name of the GPU.
    """
    if tokens >= FEW_REQUESTS * limit or not can_store_fp8_cache(config, options, gpu):
        return ""
    pages = 2 * tokens // options.page_size
    return f"--kv-cache-dtype fp8 makes room for {pages * options.page_size:,} tokens"


def format_gib(size: float) -> str:
    """Format a number of bytes in GiB."""
    return f"{size / GIB:.1f} GiB"


def format_count(count: int) -> str:
    """Format a number of parameters, such as 8.2B or 494M."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= ROUNDED_UP * size:
            return f"{count / size:.3g}{unit}"
    return str(count)
