"""What an engine's options mean for this model and device."""

from __future__ import annotations

import torch

from mizzen.attention.base import Geometry, KVSpec
from mizzen.attention.registry import check_backends
from mizzen.core.config import SchedulerConfig
from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.validate import check_model, precision_of
from mizzen.models.config import ModelConfig

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def dtype_of(options: EngineOptions, config: ModelConfig) -> torch.dtype:
    """Resolve the precision of weights and KV."""
    return DTYPES[precision_of(options, config)]


def kv_dtype_of(options: EngineOptions, weights: torch.dtype) -> torch.dtype:
    """Resolve the precision of KV; `check_model` refuses what does not go together."""
    return weights if options.kv_cache_dtype == "auto" else torch.float8_e4m3fn


def is_fused(options: EngineOptions) -> bool:
    """Tell whether the kernels of `mizzen.kernels` are used."""
    return options.device == "cuda" and options.fusion == "auto"


def check_options(options: EngineOptions, config: ModelConfig) -> None:
    """Refuse what this engine, model or device cannot do, before weights are read.

    Raises:
        ValueError: names the option and the way out.
    """
    check_model(options, config)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda finds no GPU here: use --device cpu, or a machine with one")
    if options.device == "cuda" and torch.cuda.device_count() < options.local_ranks:
        nodes = f" on --nodes {options.nodes} needs {options.local_ranks} GPUs on each"
        raise ValueError(
            f"--tensor {options.tensor}{nodes if options.nodes > 1 else ' needs as many GPUs'}, "
            f"{torch.cuda.device_count()} are here: lower it"
        )
    check_backends(
        geometry_of(config, options.tensor),
        KVSpec(torch.device(options.device), kv_dtype_of(options, dtype_of(options, config))),
        prefill=options.attention_prefill,
        decode=options.attention_decode,
    )


def geometry_of(config: ModelConfig, ranks: int) -> Geometry:
    """Return the shape of a rank's attention; KV heads that are fewer than ranks are held by several."""
    return Geometry(
        heads=config.heads // ranks,
        kv_heads=max(1, config.kv_heads // ranks),
        head_dim=config.head_dim,
        windows=config.windows,
    )


def scheduler_config(
    options: EngineOptions, pages: int, context_length: int, end_token_ids: tuple[int, ...]
) -> SchedulerConfig:
    """Return what the scheduler is told."""
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
    )
