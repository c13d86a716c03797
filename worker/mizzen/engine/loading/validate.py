"""What cannot work, as an engine's options and its model's config.json alone tell; without torch."""

from __future__ import annotations

import os
from pathlib import Path

from mizzen.engine.config import EngineOptions
from mizzen.models.config import ModelConfig
from mizzen.models.shares import check_shardable


def precision_of(options: EngineOptions, config: ModelConfig) -> str:
    """Resolve the precision of weights, by its name in torch."""
    if options.dtype != "auto":
        return options.dtype
    return config.dtype if options.device == "cuda" else "float32"


def check_model(options: EngineOptions, config: ModelConfig) -> None:
    """Refuse options that this model cannot be served with.

    Raises:
        ValueError: names the option and the way out.
    """
    check_shardable(config, options.tensor)
    if options.context_length is not None and options.context_length > config.context_length:
        raise ValueError(
            f"--context-length {options.context_length} is beyond the model's max_position_embeddings "
            f"({config.context_length}): lower it"
        )
    if options.kv_cache_dtype == "fp8" and (
        options.device != "cuda" or precision_of(options, config) != "bfloat16"
    ):
        raise ValueError("--kv-cache-dtype fp8 needs --device cuda and --dtype bfloat16: use auto here")


def make_trace_folder(folder: Path) -> None:
    """Make the folder of --profile, if need be.

    Raises:
        ValueError: it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--profile {folder} is no folder to write to: {error}") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--profile {folder} is no folder to write to")
