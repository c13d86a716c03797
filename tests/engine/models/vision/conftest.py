# SPDX-License-Identifier: Apache-2.0
"""Vision encoders of tiny random twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mizzen.engine.loading.vision_setup import load_vision_encoder
from mizzen.layers.context import BuildContext
from mizzen.models.registry import read_config
from mizzen.models.vision.encoder import VisionEncoder

LoadEncoder = Callable[[Path], VisionEncoder]


@pytest.fixture
def load_encoder() -> LoadEncoder:
    """Function that loads the vision encoder of a model folder in float32."""

    def load(folder: Path) -> VisionEncoder:
        config = read_config(folder).vision
        assert config is not None
        build = BuildContext(device=torch.device("cpu"), dtype=torch.float32)
        return load_vision_encoder(folder, build, config)

    return load
