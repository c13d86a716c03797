# SPDX-License-Identifier: Apache-2.0
"""Sizes and drawings of LLaVA's images are those of Transformers' image processors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from model_files import CLIP, SIGLIP, image_sizes, make_rules, random_image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from mizzen.images.drawing import draw_tiles
from mizzen.images.rules import read_image_rules
from mizzen.images.types import ImageRules, InvalidImage, PixelLimits

SQUARE = {"height": 336, "width": 336}
CLIP_FILE = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 336},
    "crop_size": SQUARE,
}
RESIZINGS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "crop": (CLIPImageProcessorPil, CLIP, CLIP_FILE),
    "small": (CLIPImageProcessorPil, CLIP, CLIP_FILE | {"size": {"shortest_edge": 301}}),
    "large": (CLIPImageProcessorPil, CLIP, CLIP_FILE | {"size": {"shortest_edge": 401}, "resample": 2}),
    "stretch": (CLIPImageProcessorPil, CLIP, CLIP_FILE | {"size": SQUARE}),
    "pad": (
        LlavaImageProcessorPil,
        CLIP,
        {"image_processor_type": "LlavaImageProcessor", "size": SQUARE, "crop_size": SQUARE, "do_pad": True},
    ),
    "siglip": (
        SiglipImageProcessorPil,
        SIGLIP,
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 384, "width": 384}},
    ),
}
"""Transformers' image processor, `vision_config` and preprocessor_config.json."""


def llava_rules(vision: dict[str, Any], preprocessor: dict[str, Any], **config: Any) -> ImageRules:
    return make_rules("llava", {"image_token_index": 32000, "vision_config": vision, **config}, preprocessor)


@pytest.mark.parametrize(
    ("vision", "strategy", "added"), [(CLIP, "default", 1), (CLIP, "full", 1), (SIGLIP, "full", 0)]
)
def test_embeddings_are_those_of_transformers(vision: dict[str, Any], strategy: str, added: int) -> None:
    edge = vision["image_size"]
    processor = SimpleNamespace(
        _merge_kwargs=lambda: {"images_kwargs": {}},
        image_processor=SimpleNamespace(crop_size={"height": edge, "width": edge}),
        patch_size=vision["patch_size"],
        num_additional_image_tokens=added,
        vision_feature_select_strategy=strategy,
    )
    found = LlavaProcessor._get_num_multimodal_tokens(processor, image_sizes=[[5, 7]])  # pyright: ignore
    rules = llava_rules(vision, {}, vision_feature_select_strategy=strategy)
    geometry = rules.geometry(7, 5)
    assert [geometry.embeddings] == found.num_image_tokens
    assert rules.expansion(geometry).tolist() == [32000] * geometry.embeddings


@pytest.mark.parametrize("name", RESIZINGS)
def test_pixels_are_those_of_transformers(name: str) -> None:
    make_processor, vision, preprocessor = RESIZINGS[name]
    rules = llava_rules(vision, preprocessor, vision_feature_select_strategy="full")
    processor = make_processor(
        **{key: value for key, value in preprocessor.items() if key != "image_processor_type"},
        do_rescale=False,
        do_normalize=False,
    )
    for width, height in image_sizes(15, largest=700):
        if max(width, height) > min(700, 199 * min(width, height)):
            continue
        image = random_image(width, height)
        expected = processor(images=image, return_tensors="np")["pixel_values"]
        found = draw_tiles(image, rules.drawings(width, height))
        np.testing.assert_array_equal(found.transpose(0, 3, 1, 2), expected)
        geometry = rules.geometry(width, height)
        assert found.shape == (geometry.tiles, geometry.height, geometry.width, 3)


@pytest.mark.parametrize("name", RESIZINGS)
def test_normalization_is_that_of_transformers(name: str) -> None:
    make_processor, vision, preprocessor = RESIZINGS[name]
    processor = make_processor(
        **{key: value for key, value in preprocessor.items() if key != "image_processor_type"}
    )
    normalization = llava_rules(vision, preprocessor).normalization
    assert normalization.scale == pytest.approx(processor.rescale_factor)
    assert normalization.mean == tuple(processor.image_mean)
    assert normalization.deviation == tuple(processor.image_std)


def test_a_model_without_vision_config_is_llava_1_5() -> None:
    geometry = make_rules("llava", {}, {}).geometry(300, 200)
    assert (geometry.embeddings, geometry.grid, geometry.height) == (576, (1, 24, 24), 336)


def test_the_placeholder_has_the_text_of_the_tokenizer() -> None:
    config = {"image_token_index": 7}
    assert make_rules("llava", config, {}, **{"<image>": 3, "<img>": 7}).placeholder == "<img>"
    assert make_rules("llava", config, {}, **{"<img>": 7, "<image>": 7}).placeholder == "<image>"
    assert make_rules("llava", config, {}).placeholder == "<image>"


def test_limits_and_narrow_images_are_refused() -> None:
    rules = llava_rules(CLIP, {})
    assert rules.pixel_bounds is None
    with pytest.raises(InvalidImage, match=r"max_pixels cannot be set: this model resizes .* 336 x 336"):
        rules.geometry(10, 10, PixelLimits(max_pixels=100))
    with pytest.raises(InvalidImage, match=r"201 x 1 .* at most 200 times"):
        rules.geometry(201, 1)
    assert rules.geometry(200, 1, PixelLimits()).embeddings == 576


@pytest.mark.parametrize(
    ("preprocessor", "field"),
    [
        ({"crop_size": {"height": 224, "width": 224}}, "crop_size"),
        ({"size": {"height": 224, "width": 224}}, "size"),
        ({"size": {"shortest_edge": 336, "longest_edge": 500}}, "size"),
        ({"do_center_crop": False, "size": {"shortest_edge": 336}}, "size"),
        ({"do_center_crop": "yes"}, "do_center_crop"),
        ({"do_resize": False}, "do_resize"),
    ],
)
def test_processors_that_do_not_fit_the_encoder_are_refused(preprocessor: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"preprocessor_config.json: {field} must"):
        llava_rules(CLIP, preprocessor)


def test_other_encoders_have_no_rules() -> None:
    config = {"model_type": "llava", "vision_config": {"model_type": "siglip2_vision_model"}}
    assert read_image_rules(config, {}, {}) is None
