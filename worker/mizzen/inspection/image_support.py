# SPDX-License-Identifier: Apache-2.0
"""Says whether the engine accepts images, and describes the vision encoder."""

from __future__ import annotations

import msgspec

from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.served_images import ServedImages, choose_served_images, may_serve_images
from mizzen.images.rules import read_image_rules
from mizzen.inspection.model_files import ModelFiles
from mizzen.models.config import ModelConfig
from mizzen.models.vision.parameters import count_vision_parameters


class ImageSupport(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Images that the engine accepts, and the vision encoder, which only rank 0 holds.

    Attributes:
        tower: type of the vision encoder.
        parameters: number of its parameters.
        weight_bytes: bytes of its weights in memory.
        estimated: whether preprocessor_config.json is unknown, so that the sizes of images follow from the
            defaults of the family's image processor.
        largest_width: width in pixels of a tile of the largest image.
        largest_height: height in pixels of a tile of the largest image.
        largest_tiles: number of tiles of the largest image.
        largest_embeddings: number of tokens of a prompt that the largest image replaces.
        step_bytes: estimate of the memory of rank 0 for images besides these weights.
    """

    tower: str
    parameters: int
    weight_bytes: int
    estimated: bool
    largest_width: int
    largest_height: int
    largest_tiles: int
    largest_embeddings: int
    step_bytes: int


def find_served_images(files: ModelFiles, options: EngineOptions, config: ModelConfig) -> ServedImages | None:
    """Return the images that the engine accepts; None if it serves text alone.

    Raises:
        ValueError: the engine would refuse to start; the message names a remedy.
    """
    if files.fields is None or not may_serve_images(options, config):
        return None
    rules = read_image_rules(files.fields.values, files.preprocessor, {})
    context = options.context_length or config.context_length
    return None if rules is None else choose_served_images(options, config, context, rules)


def describe_images(
    images: ServedImages, options: EngineOptions, element: int, *, estimated: bool
) -> ImageSupport:
    """Describe the images that the engine accepts.

    Args:
        images: Images that the engine accepts.
        options: Options of the engine.
        element: Number of bytes of a weight.
        estimated: Whether preprocessor_config.json is unknown.
    """
    parameters = count_vision_parameters(images.vision)
    return ImageSupport(
        tower=images.vision.model_type,
        parameters=parameters,
        weight_bytes=parameters * element,
        estimated=estimated,
        largest_width=images.largest.width,
        largest_height=images.largest.height,
        largest_tiles=images.largest.tiles,
        largest_embeddings=images.largest.embeddings,
        step_bytes=images.estimate_bytes(options, element),
    )
