# SPDX-License-Identifier: Apache-2.0
"""Finds out in which layout a checkpoint holds the experts of a mixture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mizzen.models.config import ModelConfig
from mizzen.models.experts_config import ExpertLayout, ExpertsConfig
from mizzen.weights.checkpoint_files import checkpoint_files
from mizzen.weights.load import open_safetensors


def with_expert_layout(config: ModelConfig, folder: Path) -> ModelConfig:
    """Return the configuration with the layout of the experts in the files of a model folder.

    A model without experts, or whose family has only one layout, is returned unchanged. Loading checks later
    that all layers have the same layout.

    Raises:
        WeightsError: a file cannot be read.
    """
    if config.experts is None or config.experts.interleaved:
        return config
    layout = find_layout(folder, config.experts, config.hidden_size)
    return replace(config, experts=replace(config.experts, layout=layout))


def find_layout(folder: Path, experts: ExpertsConfig, hidden: int) -> ExpertLayout:
    """Return the layout of the first gate and up projections in the files of a folder.

    A tensor of all experts whose shape fits neither order is taken as not transposed.
    """
    end = f".{experts.names.block}.{experts.names.stacked_gate_up}"
    transposed = [experts.count, hidden, 2 * experts.width]
    for path in checkpoint_files(folder):
        with open_safetensors(path) as (_, file):
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name.endswith(end):
                    swapped = hidden != 2 * experts.width and file.get_slice(name).get_shape() == transposed
                    return ExpertLayout.TRANSPOSED if swapped else ExpertLayout.STACKED
    return ExpertLayout.SEPARATE
