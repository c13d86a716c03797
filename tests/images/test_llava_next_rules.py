# SPDX-License-Identifier: Apache-2.0
"""Sizes, tiles and trimmed grids of LLaVA-NeXT's images are those of Transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_files import CLIP, SIGLIP, image_sizes, make_rules, random_image
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.modeling_llava_next import (
    LlavaNextModel,
    image_size_to_num_patches,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from mizzen.images.drawing import draw_tiles
from mizzen.images.types import ImageRules, InvalidImage, PixelLimits

PINPOINTS: dict[str, list[list[int]]] = {
    "default": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "siglip": [[384 * rows, 384 * columns] for rows in range(1, 5) for columns in range(1, 5)],
}
TOWERS = {"default": CLIP, "siglip": SIGLIP}


def next_config(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    edge = TOWERS[name]["image_size"]
    square = {"height": edge, "width": edge}
    config = {
        "vision_config": TOWERS[name],
        "image_grid_pinpoints": PINPOINTS[name],
        "vision_feature_select_strategy": "default" if name == "default" else "full",
    }
    preprocessor = {
        "size": {"shortest_edge": edge} if name == "default" else square,
        "crop_size": square,
        "image_grid_pinpoints": PINPOINTS[name],
    }
    return config, preprocessor


def next_rules(name: str) -> ImageRules:
    return make_rules("llava_next", *next_config(name))


def sizes(name: str, count: int) -> list[tuple[int, int]]:
    """Return random sizes, those of all resolutions, and narrow ones."""
    resolutions = [(width, height) for height, width in PINPOINTS[name]]
    return [*image_sizes(count), *resolutions, (3000, 1), (1, 3000), (97, 1), (1008, 14)]


@pytest.mark.parametrize("name", PINPOINTS)
def test_embeddings_are_those_of_transformers(name: str) -> None:
    rules = next_rules(name)
    config, preprocessor = next_config(name)
    edge, is_clip = TOWERS[name]["image_size"], name == "default"
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=PINPOINTS[name], size=preprocessor["size"]),
        patch_size=14,
        num_additional_image_tokens=int(is_clip),
        vision_feature_select_strategy=config["vision_feature_select_strategy"],
        _merge_kwargs=lambda: {"images_kwargs": {}},
    )
    for method in ("_get_number_of_features", "_get_unpadded_features"):
        setattr(processor, method, getattr(LlavaNextProcessor, method).__get__(processor))
    for width, height in sizes(name, 500):
        found = LlavaNextProcessor._get_num_multimodal_tokens(  # pyright: ignore
            processor, image_sizes=[[height, width]]
        )
        geometry = rules.geometry(width, height)
        assert [geometry.embeddings] == found.num_image_tokens, (width, height)
        assert geometry.tiles == image_size_to_num_patches([height, width], PINPOINTS[name], edge)
        assert rules.expansion(geometry).tolist() == [32000] * geometry.embeddings


@pytest.mark.parametrize("name", PINPOINTS)
def test_grids_describe_the_embeddings_of_the_model(name: str) -> None:
    """Cut, trim and end rows by the grid alone, and compare with the model's own order of embeddings."""
    rules = next_rules(name)
    config, _ = next_config(name)
    patches = TOWERS[name]["image_size"] // 14
    model = SimpleNamespace(
        config=SimpleNamespace(
            vision_config=SimpleNamespace(**TOWERS[name]), image_grid_pinpoints=PINPOINTS[name]
        )
    )
    for width, height in sizes(name, 60):
        geometry = rules.geometry(width, height)
        encoded = torch.arange(1.0, geometry.tiles * patches**2 + 1).view(geometry.tiles, patches**2, 1)
        packed, _ = LlavaNextModel.pack_image_features(
            model,  # pyright: ignore
            [encoded],
            torch.tensor([[height, width]]),
            vision_feature_select_strategy=config["vision_feature_select_strategy"],
            image_newline=torch.zeros(1),
        )
        tile_rows, rows, columns = geometry.grid
        tile_columns = (geometry.tiles - 1) // tile_rows
        grid = encoded[1:].view(tile_rows, tile_columns, patches, patches).transpose(1, 2)
        grid = grid.reshape(tile_rows * patches, tile_columns * patches)
        top, left = (grid.shape[0] - rows) // 2, (grid.shape[1] - columns) // 2
        grid = grid[top : top + rows, left : left + columns]
        expected = torch.cat([encoded[0, :, 0], torch.nn.functional.pad(grid, (0, 1)).reshape(-1)])
        assert torch.equal(packed[0][:, 0], expected), (width, height)


@pytest.mark.parametrize("name", PINPOINTS)
def test_tiles_are_those_of_transformers(name: str) -> None:
    rules = next_rules(name)
    _, preprocessor = next_config(name)
    processor = LlavaNextImageProcessorPil(**preprocessor, do_rescale=False, do_normalize=False)
    for width, height in [(2, 1), (500, 20), (20, 501), *image_sizes(20, largest=500)]:
        if max(width, height) > min(500, 60 * min(width, height)):
            continue
        image = random_image(width, height)
        expected = processor(images=image, return_tensors="np")["pixel_values"][0]
        found = draw_tiles(image, rules.drawings(width, height))
        np.testing.assert_array_equal(found.transpose(0, 3, 1, 2), expected)
        geometry = rules.geometry(width, height)
        assert found.shape == (geometry.tiles, geometry.height, geometry.width, 3)


def test_without_files_sizes_are_the_defaults() -> None:
    rules = make_rules("llava_next", {}, {})
    default = next_rules("default")
    for width, height in image_sizes(50):
        assert rules.geometry(width, height) == default.geometry(width, height)


def test_limits_and_empty_images_are_refused() -> None:
    with pytest.raises(InvalidImage, match="min_pixels cannot be set: this model chooses"):
        next_rules("default").geometry(9, 9, PixelLimits(min_pixels=1))
    with pytest.raises(InvalidImage, match="0 x 9 pixels"):
        next_rules("default").geometry(0, 9)


@pytest.mark.parametrize(
    ("config", "preprocessor", "message"),
    [
        ({"image_grid_pinpoints": [[336, 300]]}, {}, "config.json: image_grid_pinpoints must be multiples"),
        ({"image_grid_pinpoints": []}, {}, "config.json: image_grid_pinpoints must be pairs"),
        ({}, {"image_grid_pinpoints": [[336, 336]]}, "preprocessor_config.json: image_grid_pinpoints must"),
        ({}, {"size": {"shortest_edge": 224}}, "preprocessor_config.json: size must be the image_size"),
        ({"vision_feature_select_strategy": "full"}, {}, "vision_feature_select_strategy must leave one"),
        ({"vision_feature_select_strategy": "cls"}, {}, "vision_feature_select_strategy must be default"),
    ],
)
def test_errors_name_the_field(config: dict[str, Any], preprocessor: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_rules("llava_next", config, preprocessor)
