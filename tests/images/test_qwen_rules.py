# SPDX-License-Identifier: Apache-2.0
"""Sizes of Qwen-VL's images are those of Transformers' image processor."""

from __future__ import annotations

import pytest
from model_files import QWEN, image_sizes, make_rules, qwen_rules
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mizzen.images.rules import read_image_rules
from mizzen.images.types import InvalidImage, PixelLimits


def processor_of(model_type: str) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(**QWEN[model_type][1])


@pytest.mark.parametrize("model_type", QWEN)
def test_embeddings_are_those_of_transformers(model_type: str) -> None:
    rules, processor = qwen_rules(model_type), processor_of(model_type)
    for width, height in image_sizes(500):
        try:
            patches = processor.get_number_of_image_patches(height, width)
        except ValueError:
            with pytest.raises(InvalidImage, match="200"):
                rules.geometry(width, height)
            continue
        geometry = rules.geometry(width, height)
        assert geometry.embeddings == patches // 4
        assert rules.expansion(geometry).tolist() == [151655] * geometry.embeddings


@pytest.mark.parametrize("model_type", QWEN)
def test_grids_are_those_of_processed_images(model_type: str) -> None:
    rules, processor = qwen_rules(model_type), processor_of(model_type)
    for width, height in image_sizes(12, largest=500):
        if max(width, height) > 500:
            continue
        outputs = processor(images=Image.new("RGB", (width, height)), return_tensors="np")
        grid = outputs["image_grid_thw"][0]
        geometry = rules.geometry(width, height)
        assert geometry.grid == tuple(grid.tolist())
        patch_size = QWEN[model_type][1]["patch_size"]
        assert (geometry.height, geometry.width) == (grid[1] * patch_size, grid[2] * patch_size)


@pytest.mark.parametrize("model_type", QWEN)
def test_without_a_preprocessor_bounds_are_the_defaults(model_type: str) -> None:
    rules = make_rules(model_type, {}, {})
    patch_size = 16 if model_type == "qwen3_vl" else 14
    processor = Qwen2VLImageProcessorPil(patch_size=patch_size)
    for width, height in image_sizes(100):
        if max(width, height) <= 200 * min(width, height):
            patches = processor.get_number_of_image_patches(height, width)
            assert rules.geometry(width, height).embeddings == patches // 4


def test_limits_of_a_request_apply_within_those_of_the_model() -> None:
    rules, processor = qwen_rules("qwen2_5_vl"), processor_of("qwen2_5_vl")
    limits = PixelLimits(min_pixels=100_000, max_pixels=200_000)
    for width, height in image_sizes(100):
        if max(width, height) <= 200 * min(width, height):
            patches = processor.get_number_of_image_patches(
                height, width, {"min_pixels": 100_000, "max_pixels": 200_000}
            )
            assert rules.geometry(width, height, limits).embeddings == patches // 4


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (PixelLimits(min_pixels=3135), "min_pixels must be from 3136 to 1003520 .*, not 3135"),
        (
            PixelLimits(max_pixels=1003521),
            "max_pixels must be from 3136 to 1003520 .*, not 1003521",
        ),
        (
            PixelLimits(min_pixels=9000, max_pixels=8000),
            "min_pixels .9000. must not be larger",
        ),
    ],
)
def test_limits_beyond_those_of_the_model_are_refused(limits: PixelLimits, message: str) -> None:
    with pytest.raises(InvalidImage, match=message):
        qwen_rules("qwen2_5_vl").geometry(100, 100, limits)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (1, 1), (201, 1), (1, 201)])
def test_narrow_and_empty_images_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidImage, match=f"{size[0]} x {size[1]}"):
        qwen_rules("qwen2_vl").geometry(*size)


@pytest.mark.parametrize(
    ("preprocessor", "field"),
    [
        ({"patch_size": 16}, "patch_size"),
        ({"merge_size": 3}, "merge_size"),
        ({"min_pixels": "many"}, "min_pixels"),
        ({"min_pixels": 5_000_000}, "min_pixels"),
        ({"size": [1, 2]}, "size"),
        ({"do_resize": False}, "do_resize"),
        ({"image_mean": [1, 2]}, "image_mean"),
        ({"rescale_factor": "1/255"}, "rescale_factor"),
    ],
)
def test_errors_name_the_field(preprocessor: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=f"preprocessor_config.json: {field} must"):
        read_image_rules({"model_type": "qwen2_vl"}, preprocessor, {})
