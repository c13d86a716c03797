# SPDX-License-Identifier: Apache-2.0
"""Builds a Transformers model for the engine, and checks it after its weights are loaded."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import torch

from mizzen.layers.context import BuildContext
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.config import ModelConfig
from mizzen.models.hf_fields import ConfigError
from mizzen.models.transformers_backend.build import build_on_meta, read_hf_config
from mizzen.models.transformers_backend.checkpoint_names import name_targets
from mizzen.models.transformers_backend.deferred_add import DeferredAdds
from mizzen.models.transformers_backend.model import TransformersModel
from mizzen.weights.load import tensor_names

log = logging.getLogger(__name__)

TOLERANCE = 0.05
"""Maximum difference between two results that should be equal, relative to the largest element. Rounding in
16-bit numbers stays far below it."""


def make_transformers_model(
    folder: Path, build: BuildContext, config: ModelConfig, *, replace: bool
) -> TransformersModel:
    """Build a model whose weights are to be loaded; must be called in inference mode.

    Args:
        folder: Model folder.
        build: Settings of the layers.
        config: Configuration, as `inspection` returns it.
        replace: Whether norms, feed-forward blocks and rotations are replaced by Mizzen's.

    Raises:
        ConfigError: the model cannot be served.
    """
    model = build_on_meta(read_hf_config(folder, config.architecture), config.architecture, build.dtype)
    return TransformersModel(build, config, model, replace=replace)


def checkpoint_targets(folder: Path, model: TransformersModel) -> list[WeightTarget]:
    """Return the destinations of a checkpoint's tensors, by their names in the files.

    Raises:
        ConfigError: a tensor cannot be converted.
        WeightsError: a file cannot be read.
    """
    return name_targets(
        list(model.targets()), model.conversions, tensor_names(folder), model.config.block.names.prefix
    )


class PointwiseAttention:
    """Replaces the attention of a step: the result of a token depends only on its query and value."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return a mixture of q [tokens, heads, d] and v [tokens, kv_heads, d], of the shape of q."""
        return (q + v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)).contiguous()


def check_deferred_adds(model: TransformersModel, tokens: torch.Tensor, positions: torch.Tensor) -> None:
    """Turn the fused additions of a model off if they fail or change its result; needs inference mode."""
    adds, attend = model.deferred_adds, PointwiseAttention()
    if adds is None or not adds.active:
        return
    try:
        fused = model.hidden(tokens, positions, attend)  # type: ignore[arg-type]
    except Exception:  # the model's code may fail in any way; without fused additions it decides itself
        fused = None
    adds.turn_off()
    expected = model.hidden(tokens, positions, attend)  # type: ignore[arg-type]
    difference = math.inf if fused is None else (fused - expected).abs().max().item()
    if difference <= TOLERANCE * expected.abs().max().item():
        model.deferred_adds = DeferredAdds(model.base)


def check_independence(model: TransformersModel, device: torch.device) -> None:
    """Check that tokens influence each other only through the attention, and that positions are used.

    The same tokens, with the same positions, run in another order and next to other tokens; their hidden
    states must not change.

    Raises:
        ConfigError: they change.
    """
    vocabulary = model.config.vocab_size
    tokens = torch.tensor([3, 17, 42, 5], device=device) % vocabulary
    others = torch.tensor([9, 1, 2, 8], device=device) % vocabulary
    positions = torch.tensor([4, 0, 9, 2], device=device)
    order = torch.tensor([2, 0, 3, 1], device=device)
    attend: Any = PointwiseAttention()
    with torch.inference_mode():
        check_deferred_adds(model, tokens, positions)
        model.step.compares_halves = model.defers_rotation
        model.hidden(tokens, positions, attend)
        model.step.compares_halves = False
        if model.step.halves_differ:
            model.keep_rotation()
        expected = model.hidden(tokens, positions, attend)
        permuted = model.hidden(tokens[order], positions[order], attend)
        mixed = torch.where(torch.arange(4, device=device) % 2 == 0, tokens, others)
        changed = model.hidden(mixed, positions, attend)
    scale = expected.float().abs().max()
    differences = torch.stack(
        [(permuted - expected[order]).abs().max(), (changed - expected)[::2].abs().max()]
    ).float()
    if not bool((differences <= TOLERANCE * scale).all()):
        raise ConfigError(
            f"{model.config.architecture} cannot be served: its tokens influence each other outside the "
            "attention, or it does not use the given positions. Use another model"
        )
    adds = model.deferred_adds
    log.info(
        "the model runs through Transformers; fused: rotation %s, additions to the residual stream %s",
        "yes" if model.defers_rotation else "no",
        "yes" if adds is not None and adds.active else "no",
    )
