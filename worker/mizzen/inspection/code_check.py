# SPDX-License-Identifier: Apache-2.0
"""Checks models that run through Transformers as the engine does when it starts.

Only these checks import torch and Transformers, and only if both are installed.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mizzen.engine.config import EngineOptions
from mizzen.models.config import ModelConfig
from mizzen.models.hf_fields import ConfigError
from mizzen.models.transformers_backend.installed import find_package


def can_check_code() -> bool:
    """Return whether torch and Transformers are installed."""
    return importlib.util.find_spec("torch") is not None and find_package() is not None


def check_code(config: ModelConfig, options: EngineOptions, values: dict[str, object]) -> ModelConfig:
    """Build a model in Transformers without weights; return its configuration with the sizes found there.

    Args:
        config: Configuration as it was read from config.json.
        options: Options of the engine; `tensor` is the number of GPUs that share the model.
        values: Fields of config.json.

    Raises:
        ConfigError: The engine cannot serve the model with these options; the message says why.
    """
    from mizzen.engine.loading.model_setup import inspect_in_transformers

    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values), encoding="utf-8")
        try:
            return inspect_in_transformers(replace(options, model=folder), config)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{folder}/", "")) from error
