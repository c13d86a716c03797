# SPDX-License-Identifier: Apache-2.0
"""Finds the layers that a checkpoint stores unquantized, although its configuration does not list them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mizzen.models.config import ModelConfig
from mizzen.weights.checkpoint_files import FLOATING, checkpoint_files
from mizzen.weights.load import open_safetensors, own_name

WEIGHT = ".weight"


def with_stored_schemes(config: ModelConfig, folder: Path) -> ModelConfig:
    """Return the configuration with the layers that the files of a model folder store unquantized.

    Some exporters of AWQ do not list them.

    Raises:
        WeightsError: A file cannot be read.
    """
    if not config.quantization.schemes:
        return config
    weights: dict[str, str] = {}
    for path in checkpoint_files(folder):
        with open_safetensors(path) as (header, _):
            for name, entry in header.entries.items():
                own = own_name(name, config.text_tensors)
                if own is not None and own.endswith(WEIGHT):
                    weights[own.removesuffix(WEIGHT)] = entry["dtype"]
    unquantized = frozenset(name for name, dtype in weights.items() if dtype in FLOATING)
    return replace(config, quantization=replace(config.quantization, unlisted=unquantized))
