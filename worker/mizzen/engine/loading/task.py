# SPDX-License-Identifier: Apache-2.0
"""Reads the task of a model, for the description of its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mizzen.engine.config import EngineOptions
from mizzen.models.config import ModelConfig
from mizzen.models.pooling.modules import read_modules


def read_task(options: EngineOptions, config: ModelConfig) -> dict[str, Any]:
    """Return the fields of `EngineInfo` that describe the task of a model.

    Raises:
        ConfigError: A module of sentence-transformers is not supported.
    """
    return {
        "task": config.task,
        "labels": config.labels,
        "score_activation": config.score_activation,
        "pooling": read_modules(Path(options.model)).pooling or config.pooling,
    }
