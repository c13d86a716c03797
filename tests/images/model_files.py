# SPDX-License-Identifier: Apache-2.0
"""Configurations of models with images, as their publishers write them, and sizes of images to try."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from mizzen.images.rules import read_image_rules
from mizzen.images.types import ImageRules

QWEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        {"image_token_id": 151655, "vision_config": {"patch_size": 14, "spatial_merge_size": 2}},
        {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2},
    ),
    "qwen2_5_vl": (
        {"image_token_id": 151655, "vision_config": {"patch_size": 14, "spatial_merge_size": 2}},
        {"size": {"shortest_edge": 3136, "longest_edge": 1003520}, "patch_size": 14, "merge_size": 2},
    ),
    "qwen3_vl": (
        {"image_token_id": 151655, "vision_config": {"patch_size": 16, "spatial_merge_size": 2}},
        {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16, "merge_size": 2},
    ),
}
"""Fields of config.json and preprocessor_config.json by model type."""
CLIP: dict[str, Any] = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
SIGLIP: dict[str, Any] = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}


def make_rules(
    model_type: str, config: dict[str, Any], preprocessor: dict[str, Any], **tokens: int
) -> ImageRules:
    """Read rules that must exist."""
    rules = read_image_rules({"model_type": model_type, **config}, preprocessor, tokens)
    assert rules is not None
    return rules


def qwen_rules(model_type: str, **preprocessor: Any) -> ImageRules:
    config, processor = QWEN[model_type]
    return make_rules(model_type, config, processor | preprocessor)


def image_sizes(count: int, largest: int = 2000) -> Iterator[tuple[int, int]]:
    """Yield extreme and random widths and heights."""
    yield from [
        (1, 2),
        (1, 200),
        (200, 1),
        (13, 13),
        (14, 14),
        (largest, 10),
        (27, 29),
        (8000, 6000),
        (41, 8192),
    ]
    source = random.Random(1)
    for _ in range(count):
        yield source.randint(1, largest), source.randint(1, largest)


def random_image(width: int, height: int) -> Image.Image:
    """Return an image of random colors in RGB."""
    source = np.random.default_rng(width * 10_000 + height)
    return Image.fromarray(source.integers(0, 256, (height, width, 3), dtype=np.uint8))
