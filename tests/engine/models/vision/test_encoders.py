# SPDX-License-Identifier: Apache-2.0
"""Embeddings of images equal those of Transformers, which also normalises the pixels and cuts the patches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vision_twins import TOWERS, save_vision_twin

from mizzen.models.vision.encoder import VisionEncoder

QWEN_TWINS = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe")
LoadEncoder = Callable[[Path], VisionEncoder]


def random_pixels(height: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return a random image, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def encode(encoder: VisionEncoder, pixels: np.ndarray[Any, Any], grid: tuple[int, int, int]) -> torch.Tensor:
    with torch.inference_mode():
        return encoder(torch.from_numpy(pixels), grid)


def assert_close(embeddings: torch.Tensor, expected: torch.Tensor) -> None:
    assert embeddings.shape == expected.shape
    assert expected.std() > 0.1
    torch.testing.assert_close(embeddings, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("twin", QWEN_TWINS)
def test_qwen(twin: str, load_encoder: LoadEncoder, tmp_path: Path) -> None:
    model = save_vision_twin(tmp_path, twin, TOWERS[twin])
    encoder = load_encoder(tmp_path)
    processor = Qwen2VLImageProcessorPil(patch_size=4, do_resize=False)
    assert encoder.deepstack_layers == (2 if twin.startswith("qwen3") else 0)
    for height, width in [(8, 8), (8, 72), (48, 24), (24, 48), (32, 40), (56, 80), (80, 16), (88, 88)]:
        pixels = random_pixels(height, width)
        inputs = processor(Image.fromarray(pixels), return_tensors="pt")
        with torch.inference_mode():
            outputs = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        stages = [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or ())]
        expected = torch.cat([torch.cat(tuple(images)) for images in stages], dim=-1)
        grid = (1, height // 4, width // 4)
        assert inputs["image_grid_thw"].tolist() == [[*grid]]
        assert_close(encode(encoder, pixels[None], grid), expected)
