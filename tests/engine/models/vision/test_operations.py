# SPDX-License-Identifier: Apache-2.0
"""Counts of operations equal those of the operations that PyTorch runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from vision_twins import TOWERS, save_vision_twin

from mizzen.models.vision.encoder import VisionEncoder
from mizzen.models.vision.operations import count_encoding_operations

SIZES = {"llava-clip": (24, 24), "llava-next": (24, 24), "qwen2.5-vl": (48, 72)}
"""Height and width of images, where they are not 32 x 48; windows of 24 pixels cover 48 x 72."""


@pytest.mark.parametrize(
    "twin", ["llava-clip", "llava-next", "pixtral", "mistral3", "qwen2-vl", "qwen2.5-vl", "qwen3-vl"]
)
def test_counts_are_those_of_pytorch(
    twin: str, load_encoder: Callable[[Path], VisionEncoder], tmp_path: Path
) -> None:
    save_vision_twin(tmp_path, twin, TOWERS[twin])
    encoder = load_encoder(tmp_path)
    height, width = SIZES.get(twin, (32, 48))
    tiles = 3 if twin == "llava-next" else 1
    pixels = torch.zeros(tiles, height, width, 3, dtype=torch.uint8)
    size = encoder.config.patch_size
    patches = height * width // size**2
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        encoder(pixels, (1, 3, 6) if tiles == 3 else (1, height // size, width // size))
    counted = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    attention = counted.pop("aten.bmm")
    gemms = sum(counted.values())
    operations = count_encoding_operations(encoder.config, tiles, patches)
    # A class token adds to the number of tokens, which the count leaves out.
    tolerance = 2 / patches if encoder.config.class_token else 1e-9
    assert operations.gemms == pytest.approx(gemms, rel=tolerance)
    assert operations.attention == pytest.approx(attention, rel=2 * tolerance)
    assert operations.total == operations.gemms + operations.attention
