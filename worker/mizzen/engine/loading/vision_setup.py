# SPDX-License-Identifier: Apache-2.0
"""Builds the vision encoder of a model for images, and loads its weights."""

from __future__ import annotations

from pathlib import Path

import torch

from mizzen.layers.context import BuildContext
from mizzen.models.vision.config import VisionConfig
from mizzen.models.vision.encoder import VisionEncoder, make_vision_encoder
from mizzen.weights.checkpoint_files import WeightsError
from mizzen.weights.load import ProgressCallback, fill_dummy, load_checkpoint


def load_vision_encoder(
    folder: Path,
    build: BuildContext,
    config: VisionConfig,
    *,
    dummy_seed: int | None = None,
    progress: ProgressCallback = lambda done, total: None,
) -> VisionEncoder:
    """Make the vision encoder on rank 0, and load its weights.

    Args:
        folder: Model folder.
        build: Device and data type of the model.
        config: Architecture of the encoder.
        dummy_seed: Seed of random weights; None to load those of the checkpoint.
        progress: Called with the bytes of weights loaded so far and the bytes of all weights.

    Raises:
        WeightsError: The checkpoint lacks tensors of the encoder, has others, or cannot be read; a quantized
            tower is refused in this way, too.
    """
    with torch.inference_mode():
        encoder = make_vision_encoder(build, config)
        if dummy_seed is not None:
            fill_dummy(encoder.targets(), seed=dummy_seed, progress=progress)
        else:
            try:
                load_checkpoint(
                    folder,
                    encoder.targets(),
                    tied=False,
                    progress=progress,
                    part=config.tensors,
                    ignored=encoder.ignored,
                )
            except WeightsError as error:
                raise WeightsError(
                    f"the vision encoder cannot be loaded: {error}; --images off serves the text part alone"
                ) from error
        encoder.finish()
    return encoder
