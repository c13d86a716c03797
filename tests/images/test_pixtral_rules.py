# SPDX-License-Identifier: Apache-2.0
"""Sizes and expansions of Pixtral's and Mistral 3's images are those of Transformers."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from model_files import image_sizes, make_rules, random_image
from transformers.models.pixtral import image_processing_pil_pixtral as pil_processing

from mizzen.images.drawing import draw_tiles
from mizzen.images.prompt import expand_placeholders
from mizzen.images.types import ImageRules, InvalidImage, PixelLimits

with mock.patch.dict(
    sys.modules, {"transformers.models.pixtral.image_processing_pixtral": pil_processing}
):  # the processor imports a function from the module that needs torchvision
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

TOKENS = {"[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13}
MODELS: dict[str, tuple[str, int, int, int]] = {
    "pixtral": ("llava", 16, 1, 1024),
    "mistral3": ("mistral3", 14, 2, 1540),
}
"""Model type, patch size, merge size and longest edge."""


def pixtral_rules(name: str) -> ImageRules:
    model_type, patch_size, _, longest = MODELS[name]
    vision = {"model_type": "pixtral", "image_size": longest, "patch_size": patch_size}
    config = {"vision_config": vision, "image_token_index": 10}
    preprocessor = {
        "size": {"longest_edge": longest},
        "patch_size": {"height": patch_size, "width": patch_size},
    }
    return make_rules(model_type, config, preprocessor, **TOKENS)


@pytest.mark.parametrize("name", MODELS)
def test_expansions_are_those_of_transformers(name: str) -> None:
    rules = pixtral_rules(name)
    _, patch_size, merge_size, longest = MODELS[name]
    processor = SimpleNamespace(
        patch_size=patch_size,
        spatial_merge_size=merge_size,
        image_token="[IMG]",
        image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )
    factor = patch_size * merge_size
    for width, height in [*image_sizes(500), (1541, 1540), (3080, 2), (1, 1540)]:
        image = np.broadcast_to(np.uint8(0), (3, height, width))
        new_size = pil_processing.get_resize_output_image_size(
            image, longest, factor, input_data_format="channels_first"
        )
        if 0 in new_size:
            with pytest.raises(InvalidImage, match=f"at most {longest} times"):
                rules.geometry(width, height)
            continue
        geometry = rules.geometry(width, height)
        assert (geometry.height, geometry.width) == new_size
        assert geometry.grid == (1, new_size[0] // patch_size, new_size[1] // patch_size)
        text = PixtralProcessor.replace_image_token(processor, {"image_sizes": [new_size]}, 0)  # pyright: ignore
        expected = [TOKENS[part + "]"] for part in text.split("]")[:-1]]
        expansion = rules.expansion(geometry)
        assert expansion.tolist() == expected
        assert geometry.embeddings == expected.count(10)


@pytest.mark.parametrize("name", MODELS)
def test_pixels_are_those_of_transformers(name: str) -> None:
    rules = pixtral_rules(name)
    _, patch_size, merge_size, longest = MODELS[name]
    processor = pil_processing.PixtralImageProcessorPil(
        size={"longest_edge": longest},
        patch_size=patch_size * merge_size,
        do_rescale=False,
        do_normalize=False,
    )
    for width, height in [(1, 2), (1600, 30), (30, 1600), *image_sizes(20, largest=500)]:
        if max(width, height) > 1600:
            continue
        image = random_image(width, height)
        expected = processor(images=image, return_tensors="np")["pixel_values"]
        found = draw_tiles(image, rules.drawings(width, height))
        np.testing.assert_array_equal(found.transpose(0, 3, 1, 2), expected)


@pytest.mark.parametrize("name", MODELS)
def test_narrow_images_are_refused_at_the_longest_edge(name: str) -> None:
    longest = MODELS[name][3]
    for factor in (1, 2, 3, 7):
        for width, height in [(longest * factor, factor), (factor, longest * factor)]:
            assert pixtral_rules(name).geometry(width, height).embeddings > 0
            wider = (width + 1, height) if width > height else (width, height + 1)
            with pytest.raises(InvalidImage, match=f"at most {longest} times"):
                pixtral_rules(name).geometry(*wider)


def test_positions_leave_out_the_tokens_that_end_rows() -> None:
    rules = pixtral_rules("mistral3")
    geometry = rules.geometry(84, 56)
    ids, positions = expand_placeholders(np.array([5, 10, 6, 10], np.int32), [geometry] * 2, rules)
    image = [10, 10, 10, 12, 10, 10, 10, 13]
    assert ids.tolist() == [5, *image, 6, *image]
    assert [indices.tolist() for indices in positions] == [[1, 2, 3, 5, 6, 7], [10, 11, 12, 14, 15, 16]]


def test_without_files_sizes_are_the_defaults() -> None:
    rules = make_rules("mistral3", {}, {})
    assert rules.geometry(2000, 1000).width == 37 * 28
    assert rules.expansion(rules.geometry(1, 2)).tolist() == [10, 13]


def test_a_size_may_have_height_and_width() -> None:
    rules = make_rules("mistral3", {}, {"size": {"height": 280, "width": 560}})
    assert (rules.geometry(2000, 1000).width, rules.geometry(2000, 1000).height) == (560, 280)
    assert (rules.geometry(1000, 2000).width, rules.geometry(1000, 2000).height) == (140, 280)


def test_limits_are_refused() -> None:
    with pytest.raises(InvalidImage, match="max_pixels cannot be set: this model keeps images within 1540 x"):
        pixtral_rules("mistral3").geometry(9, 9, PixelLimits(max_pixels=1))


@pytest.mark.parametrize(
    ("preprocessor", "tokens", "message"),
    [
        ({}, {"[IMG]": 10, "[IMG_END]": 13}, r"added_tokens must contain \[IMG_BREAK\]"),
        ({"size": {"longest_edge": 1568}}, TOKENS, "size must be at most the image_size"),
        ({"size": {"shortest_edge": 100}}, TOKENS, "size must have a longest_edge"),
        ({"do_resize": False}, TOKENS, "do_resize must be true"),
    ],
)
def test_errors_name_the_field(preprocessor: dict[str, Any], tokens: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_rules("mistral3", {}, preprocessor, **tokens)
