# SPDX-License-Identifier: Apache-2.0
"""Resolves engine options for a model and its device: data types, kernels, geometry, scheduler config."""

from __future__ import annotations

import torch

from mizzen.attention.base import Geometry, KVSpec
from mizzen.attention.registry import check_backends
from mizzen.core.config import SchedulerConfig
from mizzen.core.images.cost import EncodingCost
from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.validate import check_model, resolve_precision
from mizzen.models.config import ModelConfig

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_dtype(options: EngineOptions, config: ModelConfig) -> torch.dtype:
    """Return the data type of unquantized weights and of activations."""
    return DTYPES[resolve_precision(options, config)]


def resolve_kv_dtype(options: EngineOptions, weights: torch.dtype) -> torch.dtype:
    """Return the data type of the KV cache, given that of the weights.

    `check_model` has rejected an FP8 cache where it is not supported.
    """
    return weights if options.kv_cache_dtype == "auto" else torch.float8_e4m3fn


def uses_own_kernels(options: EngineOptions) -> bool:
    """Return whether the engine uses the kernels of `mizzen.kernels`."""
    return options.device == "cuda" and options.fusion == "auto"


def check_options(options: EngineOptions, config: ModelConfig) -> None:
    """Check that model, machine and attention backends support the options, before weights are read.

    Raises:
        ValueError: An option is not supported; the message names it and what to use instead.
    """
    check_model(options, config)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda finds no GPU here: use --device cpu, or a machine with a GPU")
    if options.device == "cuda" and torch.cuda.device_count() < options.local_ranks:
        nodes = f" on --nodes {options.nodes} needs {options.local_ranks} GPUs on each"
        raise ValueError(
            f"--tensor {options.tensor}{nodes if options.nodes > 1 else ' needs as many GPUs'}, "
            f"but this machine has {torch.cuda.device_count()}: lower it"
        )
    if config.encoder is not None:
        return
    check_backends(
        rank_geometry(config, options.tensor),
        KVSpec(torch.device(options.device), resolve_kv_dtype(options, resolve_dtype(options, config))),
        prefill=options.attention_prefill,
        decode=options.attention_decode,
    )


def rank_geometry(config: ModelConfig, ranks: int) -> Geometry:
    """Return the attention geometry of a rank; if there are fewer KV heads than ranks, ranks share heads."""
    ranks = 1 if config.replicates_attention else ranks
    return Geometry(
        heads=config.heads // ranks,
        kv_heads=max(1, config.kv_heads // ranks),
        head_dim=config.head_dim,
        windows=config.windows,
        scale=config.block.attention_scale,
        softcap=config.block.attention_softcap,
        has_sinks=config.block.attention_sinks,
    )


def scheduler_config(
    options: EngineOptions,
    pages: int,
    context_length: int,
    end_token_ids: tuple[int, ...],
    image_capacity: int = 0,
    encoding_cost: EncodingCost | None = None,
) -> SchedulerConfig:
    """Return the configuration of the scheduler for a number of KV pages and of stored image embeddings."""
    return SchedulerConfig(
        pages_total=pages,
        context_length=context_length,
        end_token_ids=end_token_ids,
        page_size=options.page_size,
        max_running_requests=options.max_running_requests,
        max_waiting_requests=options.max_waiting_requests,
        prefill_chunk_tokens=options.prefill_chunk_tokens,
        max_step_milliseconds=options.max_step_milliseconds,
        steps_in_flight=options.steps_in_flight,
        prefix_cache=options.prefix_cache,
        eviction=options.eviction,
        policy=options.policy,
        check_integrity=options.check_integrity,
        image_capacity=image_capacity,
        encoding_cost=encoding_cost,
    )
