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
from transformers.image_processing_utils import select_best_resolution
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.modeling_llava_next import unpad_image
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
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
    assert encoder.config.deepstack_layers == (2 if twin.startswith("qwen3") else 0)
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


@pytest.mark.parametrize("twin", ["qwen3-vl", "qwen2.5-vl"])
def test_padded_feed_forward_blocks(twin: str, load_encoder: LoadEncoder, tmp_path: Path) -> None:
    """Inner sizes for which GEMMs would be slow are padded, with and without a gate."""
    model = save_vision_twin(tmp_path, twin, {**TOWERS[twin], "intermediate_size": 42})
    encoder = load_encoder(tmp_path)
    pixels = random_pixels(24, 40)
    inputs = Qwen2VLImageProcessorPil(patch_size=4, do_resize=False)(
        Image.fromarray(pixels), return_tensors="pt"
    )
    with torch.inference_mode():
        outputs = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    expected = torch.cat(tuple(outputs.pooler_output))
    assert_close(encode(encoder, pixels[None], (1, 6, 10))[:, : expected.shape[1]], expected)
    assert len(encoder.blocks[0].mlp.inner(torch.zeros(1, 48))[0]) == 64 * encoder.blocks[0].mlp.inputs


def as_tiles(pixels: np.ndarray[Any, Any], height: int, width: int) -> list[Image.Image]:
    """Cut pixels [height, width, 3] into tiles, row by row."""
    return [
        Image.fromarray(pixels[top : top + height, left : left + width])
        for top in range(0, pixels.shape[0], height)
        for left in range(0, pixels.shape[1], width)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vision_feature_layer": [-3, 1, 4], "vision_feature_select_strategy": "full"},
        {
            "vision_feature_layer": [0, -1],
            "projector_hidden_act": "relu2",
            "multimodal_projector_bias": False,
        },
    ],
)
@pytest.mark.parametrize("twin", ["llava-clip", "llava-siglip"])
def test_llava(twin: str, changes: dict[str, Any], load_encoder: LoadEncoder, tmp_path: Path) -> None:
    model = save_vision_twin(tmp_path, twin, TOWERS[twin], **changes)
    encoder = load_encoder(tmp_path)
    assert encoder.config.deepstack_layers == 0
    processor = CLIPImageProcessorPil if "clip" in twin else SiglipImageProcessorPil
    pixels = random_pixels(24, 24)
    inputs = processor(do_resize=False, do_center_crop=False)(Image.fromarray(pixels), return_tensors="pt")
    with torch.inference_mode():
        (expected,) = model.get_image_features(inputs["pixel_values"]).pooler_output
    assert_close(encode(encoder, pixels[None], (1, 3, 3)), expected)


@pytest.mark.parametrize(
    ("size", "tile_rows"),
    # Height and width of the image whose tiles are given, and the number of rows of tiles.
    [
        ((48, 48), 2),
        ((48, 24), 2),
        ((24, 72), 1),
        ((40, 24), 2),
        ((90, 200), 1),
        ((24, 40), 1),
        ((31, 33), 2),
    ],
)
def test_llava_next(size: tuple[int, int], tile_rows: int, load_encoder: LoadEncoder, tmp_path: Path) -> None:
    pinpoints = [[24, 48], [48, 24], [48, 48], [24, 72], [72, 24]]
    model = save_vision_twin(
        tmp_path, "llava-next", {**TOWERS["llava-next"], "patch_size": 4}, image_grid_pinpoints=pinpoints
    )
    processor = CLIPImageProcessorPil(do_resize=False, do_center_crop=False)
    height, width = select_best_resolution(size, pinpoints)
    assert height // 24 == tile_rows
    tiles = [Image.fromarray(random_pixels(24, 24, seed=1)), *as_tiles(random_pixels(height, width), 24, 24)]
    values = processor(tiles, return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        (expected,) = model.get_image_features(values[None], torch.tensor([size])).pooler_output
    unpadded = unpad_image(torch.zeros(1, height // 4, width // 4), size)
    grid = (tile_rows, unpadded.shape[1], unpadded.shape[2])
    pixels = np.stack([np.asarray(tile) for tile in tiles])
    assert_close(encode(load_encoder(tmp_path), pixels, grid), expected)


@pytest.mark.parametrize(
    ("twin", "changes"),
    [
        ("pixtral", {}),
        ("pixtral", {"vision_feature_layer": [2, -1]}),
        ("mistral3", {}),
        ("mistral3", {"vision_feature_layer": -2, "multimodal_projector_bias": True}),
    ],
)
def test_pixtral(twin: str, changes: dict[str, Any], load_encoder: LoadEncoder, tmp_path: Path) -> None:
    model = save_vision_twin(tmp_path, twin, TOWERS[twin], **changes)
    encoder = load_encoder(tmp_path)
    processor = PixtralImageProcessorPil(patch_size={"height": 4, "width": 4}, do_resize=False)
    for height, width in [(8, 16), (8, 56), (40, 16), (24, 32)]:
        pixels = random_pixels(height, width)
        inputs = processor(Image.fromarray(pixels), return_tensors="pt")
        with torch.inference_mode():
            (expected,) = model.get_image_features(
                inputs["pixel_values"], image_sizes=inputs["image_sizes"]
            ).pooler_output
        assert_close(encode(encoder, pixels[None], (1, height // 4, width // 4)), expected)


def test_several_tiles_are_independent(load_encoder: LoadEncoder, tmp_path: Path) -> None:
    save_vision_twin(tmp_path, "llava-clip", TOWERS["llava-clip"])
    encoder = load_encoder(tmp_path)
    pixels = np.stack([random_pixels(24, 24, seed) for seed in range(3)])
    single = [encode(encoder, tile[None], (1, 3, 3)) for tile in pixels]
    torch.testing.assert_close(encode(encoder, pixels, (3, 3, 3)), torch.cat(single))


@pytest.mark.parametrize(
    ("twin", "shape", "message"),
    [
        ("qwen2.5-vl", (1, 12, 8), "8 x 12 pixels are no multiples of 8"),
        ("qwen2.5-vl", (2, 8, 8), "an image of this model is one tile, not 2"),
        ("llava-clip", (1, 24, 32), "the model's images have 24 x 24 pixels, not 32 x 24"),
        ("llava-next", (1, 24, 24), "1 tiles are too few"),
    ],
)
def test_other_sizes_are_refused(
    twin: str, shape: tuple[int, int, int], message: str, load_encoder: LoadEncoder, tmp_path: Path
) -> None:
    save_vision_twin(tmp_path, twin, TOWERS[twin])
    with pytest.raises(ValueError, match=message):
        encode(load_encoder(tmp_path), np.zeros((*shape, 3), np.uint8), (1, 1, 1))
