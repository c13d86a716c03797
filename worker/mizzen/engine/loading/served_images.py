# SPDX-License-Identifier: Apache-2.0
"""Decides whether an engine serves images, and how many embeddings of them it keeps.

Importing this module does not import torch: `mizzen inspect` uses it too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from mizzen.engine.config import EngineOptions
from mizzen.images.rules import load_image_rules
from mizzen.images.types import ImageGeometry, ImageRules, InvalidImage, PixelLimits
from mizzen.models.config import ModelConfig
from mizzen.models.vision.config import CHANNELS, VisionConfig

ASPECT_RATIOS = (1, 4 / 3, 3 / 2, 16 / 9, 2, 3, 5, 10, 30, 100, 200)
"""Aspect ratios among which the largest image is searched."""
MAX_EDGE = 1 << 16
"""Length in pixels of the longer edge of the largest image that is tried."""
EDGE_STEP = 1.02
"""Ratio between the lengths of edges that are tried."""
STORED_STEPS = 4
"""Number of the largest steps with prefill whose prompts the store has room for, if they are images alone."""
STORED_IMAGES = 2
"""Number of the largest images that the store has room for: one that is used, and one for the next step."""


@dataclass(frozen=True, slots=True)
class ServedImages:
    """Images that an engine accepts, and the size of its store."""

    rules: ImageRules
    vision: VisionConfig
    largest: ImageGeometry
    """The largest image that fits into a prompt, by the pixels that the encoder receives."""
    capacity: int
    """Number of embeddings that the store keeps."""

    @property
    def width(self) -> int:
        """Number of elements of a stored embedding, including the features for the decoder's first layers."""
        return self.vision.output_size * (1 + self.vision.deepstack_layers)

    def estimate_bytes(self, options: EngineOptions, element: int) -> int:
        """Estimate the memory of rank 0 for images: the store, embeddings of a step, and an encoding.

        Args:
            options: Engine options.
            element: Bytes per element of embeddings and activations.
        """
        rows = self.capacity + options.prefill_chunk_tokens
        return rows * self.width * element + estimate_encoding_bytes(self.vision, self.largest, element)


def read_served_images(options: EngineOptions, config: ModelConfig, context: int) -> ServedImages | None:
    """Return the images that an engine accepts; None if it serves text alone.

    Args:
        options: Engine options.
        config: Configuration of the model.
        context: Maximum number of prompt plus output tokens of a request.

    Raises:
        ValueError: The rules for images cannot be read, no image fits into the context, the decoder has too
            few layers, or an option is wrong.
    """
    if not may_serve_images(options, config):
        return None
    rules = load_image_rules(Path(options.model))
    return None if rules is None else choose_served_images(options, config, context, rules)


def may_serve_images(options: EngineOptions, config: ModelConfig) -> bool:
    """Return whether the options and the vision encoder allow images; rules for images are needed, too."""
    return options.images != "off" and config.vision is not None and config.generates


def choose_served_images(
    options: EngineOptions, config: ModelConfig, context: int, rules: ImageRules
) -> ServedImages | None:
    """Return the images that an engine with these rules accepts; see `read_served_images`."""
    vision = config.vision
    if vision is None:
        return None
    if vision.deepstack_layers >= config.layers:
        raise ValueError(
            f"the vision encoder has features for {vision.deepstack_layers} layers, and the model has "
            f"{config.layers}: use --images off"
        )
    largest = find_largest_image(rules, context - 1)
    if largest is None:
        raise ValueError(
            f"no image fits into a context of {context} tokens: raise --context-length, or use --images off"
        )
    return ServedImages(rules, vision, largest, choose_capacity(options, largest))


def choose_capacity(options: EngineOptions, largest: ImageGeometry) -> int:
    """Return the number of embeddings that the store keeps.

    Raises:
        ValueError: The option asks for fewer than the largest image has.
    """
    if options.image_cache_tokens is None:
        return max(STORED_IMAGES * largest.embeddings, STORED_STEPS * options.prefill_chunk_tokens)
    if options.image_cache_tokens < largest.embeddings:
        raise ValueError(
            f"--image-cache-tokens {options.image_cache_tokens} is less than the {largest.embeddings} "
            "embeddings of the largest image: raise it, lower --context-length, or use --images off"
        )
    return options.image_cache_tokens


def find_largest_image(rules: ImageRules, most: int) -> ImageGeometry | None:
    """Return the image of up to `most` embeddings for which the encoder receives most pixels.

    Returns None if there is no such image.
    """
    fitting = [each for each in iterate_geometries(rules) if each.embeddings <= most]
    return max(fitting, key=lambda each: (count_pixels(each), each.embeddings), default=None)


def iterate_geometries(rules: ImageRules) -> Iterator[ImageGeometry]:
    """Yield the sizes of images of many shapes and sizes.

    A request may ask for the largest number of pixels, to which narrow images are stretched beyond it.
    """
    bounds = rules.pixel_bounds
    limits = (None,) if bounds is None else (None, PixelLimits(bounds[1], bounds[1]))
    sizes = [round(EDGE_STEP**i) for i in range(int(math.log(MAX_EDGE, EDGE_STEP)) + 1)]
    edges = [edge for edge in sorted(set(sizes)) if edge >= min(ASPECT_RATIOS)]
    for ratio in ASPECT_RATIOS:
        for edge in edges:
            other = max(1, round(edge / ratio))
            for (width, height), limit in product({(edge, other), (other, edge)}, limits):
                try:
                    yield rules.geometry(width, height, limit)
                except InvalidImage:
                    continue


def count_pixels(geometry: ImageGeometry) -> int:
    """Return the number of pixels that the encoder receives."""
    return geometry.tiles * geometry.height * geometry.width


def estimate_encoding_bytes(vision: VisionConfig, image: ImageGeometry, element: int) -> int:
    """Estimate the peak memory of encoding an image.

    At the peak, a layer holds its input, the normalised input, queries, keys and values, their rotated
    copies in float32 and the output, or the inner activations of the feed-forward block. The pixels are
    held in float32, once for each frame of a patch.

    Args:
        vision: Architecture of the encoder.
        image: Sizes of the image.
        element: Bytes per element of activations.
    """
    patches = count_pixels(image) // vision.patch_size**2
    layer = (8 * vision.hidden_size + 3 * vision.intermediate_size) * element + 8 * vision.hidden_size
    return patches * layer + 4 * CHANNELS * vision.frames * count_pixels(image)
