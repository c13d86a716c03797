"""What an engine's options mean for this model and device."""

from __future__ import annotations

import torch

from mizzen.core.config import SchedulerConfig
from mizzen.engine.config import EngineOptions
from mizzen.models.config import ModelConfig
from mizzen.models.shares import check_shares


def dtype_of(options: EngineOptions, config: ModelConfig) -> torch.dtype:
    """Resolve the precision of weights and KV."""
    name = options.dtype
    if name == "auto":
        name = config.dtype if options.device == "cuda" else "float32"
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


def kv_dtype_of(options: EngineOptions, weights: torch.dtype) -> torch.dtype:
    """Resolve the precision of KV.

    Raises:
        ValueError: the device or the precision of the weights does not serve it.
    """
    if options.kv_cache_dtype == "auto":
        return weights
    if options.device != "cuda" or weights != torch.bfloat16:
        raise ValueError("--kv-cache-dtype fp8 needs --device cuda and --dtype bfloat16: use auto here")
    return torch.float8_e4m3fn


def is_fused(options: EngineOptions) -> bool:
    """Tell whether the kernels of `mizzen.kernels` are used."""
    return options.device == "cuda" and options.fusion == "auto"


def check_options(options: EngineOptions, config: ModelConfig) -> None:
    """Refuse what this engine or model cannot do.

    Raises:
        ValueError: names the option and the way out.
    """
    check_shares(config, options.tensor)
    if options.context_length is not None and options.context_length > config.context_length:
        raise ValueError(
            f"--context-length {options.context_length} is beyond the model's max_position_embeddings "
            f"({config.context_length}): lower it"
        )
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda finds no GPU here: use --device cpu, or a machine with one")
    if options.device == "cuda" and torch.cuda.device_count() < options.local_ranks:
        nodes = f" on --nodes {options.nodes} needs {options.local_ranks} GPUs on each"
        raise ValueError(
            f"--tensor {options.tensor}{nodes if options.nodes > 1 else ' needs as many GPUs'}, "
            f"{torch.cuda.device_count()} are here: lower it"
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
