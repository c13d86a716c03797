# SPDX-License-Identifier: Apache-2.0
"""Decides whether an engine serves images, and allocates the encoder and the store of embeddings.

The loader calls it on every rank. Only rank 0 has the encoder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from mizzen.core.images.types import Pixels
from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.image_store import ImageStore
from mizzen.engine.loading.memory_budget import MemoryShortage
from mizzen.engine.loading.memory_need import MemoryNeed
from mizzen.engine.loading.memory_profile import measure_peak_bytes
from mizzen.engine.loading.model_setup import DUMMY_SEED, measure_targets, zeros
from mizzen.engine.loading.vision_setup import load_vision_encoder
from mizzen.engine.uploader import Uploader
from mizzen.images.rules import load_image_rules
from mizzen.images.types import ImageGeometry, ImageRules, InvalidImage
from mizzen.layers.context import BuildContext
from mizzen.models.config import ModelConfig
from mizzen.models.served_model import ServedModel
from mizzen.models.vision.config import CHANNELS, VisionConfig
from mizzen.models.vision.encoder import VisionEncoder
from mizzen.parallel.collectives import SINGLE_RANK
from mizzen.parallel.process_group import RankGroup

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
    vision = config.vision
    if options.images == "off" or vision is None or not config.generates:
        return None
    rules = load_image_rules(Path(options.model))
    if rules is None:
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
    """Yield the sizes of images of many shapes and sizes."""
    sizes = [round(EDGE_STEP**i) for i in range(int(math.log(MAX_EDGE, EDGE_STEP)) + 1)]
    edges = [edge for edge in sorted(set(sizes)) if edge >= min(ASPECT_RATIOS)]
    for ratio in ASPECT_RATIOS:
        for edge in edges:
            other = max(1, round(edge / ratio))
            for width, height in {(edge, other), (other, edge)}:
                try:
                    yield rules.geometry(width, height)
                except InvalidImage:
                    continue


def count_pixels(geometry: ImageGeometry) -> int:
    """Return the number of pixels that the encoder receives."""
    return geometry.tiles * geometry.height * geometry.width


def blank_pixels(geometry: ImageGeometry) -> Pixels:
    """Return black pixels of an image."""
    return np.zeros((geometry.tiles, geometry.height, geometry.width, CHANNELS), np.uint8)


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


class ImageMemory:
    """The encoder of rank 0 and the store of embeddings on one rank, with the memory that they need."""

    def __init__(
        self,
        options: EngineOptions,
        images: ServedImages,
        model: ServedModel,
        group: RankGroup | None,
    ) -> None:
        """Load the encoder on rank 0, and allocate the store.

        Args:
            options: Engine options.
            images: Images that the engine accepts.
            model: The decoder or a rank's shard, after its weights were loaded.
            group: Process group of the ranks; None for a single rank.

        Raises:
            WeightsError: The encoder's weights cannot be loaded.
        """
        weight = model.embedding.weight
        self.images = images
        self.device, self.element = weight.device, weight.element_size()
        self.upload = Uploader(weight.device)
        self.encoder: VisionEncoder | None = None
        if group is None or group.rank == 0:
            self.encoder = load_vision_encoder(
                Path(options.model),
                BuildContext(device=weight.device, dtype=weight.dtype),
                images.vision,
                dummy_seed=DUMMY_SEED if options.load_format == "dummy" else None,
            )
        table = zeros((images.capacity, images.width), weight.dtype, weight.device)
        ranks = group.collectives if group else SINGLE_RANK
        self.store = ImageStore(table, self.encoder, self.upload, ranks)
        self.format_bytes = measure_targets(self.encoder.targets() if self.encoder else ())
        """Bytes of the encoder's weights by their dtype; empty on ranks other than 0."""

    def add_to(self, need: MemoryNeed, options: EngineOptions) -> MemoryNeed:
        """Return the need of a rank's largest step, with images.

        The step also holds the embeddings that its chunks use, and encoding the largest image needs further
        memory, which is measured on GPUs. On CPU it is estimated, and the store is added, whose memory is
        only taken when it is written.

        Raises:
            MemoryShortage: The largest image does not fit besides the weights.
        """
        row_bytes = self.images.width * self.element
        step_bytes = need.step_bytes + options.prefill_chunk_tokens * row_bytes
        if self.device.type == "cpu":
            step_bytes += self.images.capacity * row_bytes
        if self.encoder is None:  # the embeddings are received from rank 0
            step_bytes += self.images.largest.embeddings * row_bytes
        else:
            step_bytes += self.encoding_bytes(self.encoder)
        return replace(need, step_bytes=step_bytes)

    def encoding_bytes(self, encoder: VisionEncoder) -> int:
        """Return the peak bytes of encoding the largest image: measured on GPUs, estimated on CPU.

        Raises:
            MemoryShortage: The image does not fit besides the weights.
        """
        largest = self.images.largest
        if self.device.type == "cpu":
            return estimate_encoding_bytes(self.images.vision, largest, self.element)
        pixels = self.upload(blank_pixels(largest))
        try:
            return measure_peak_bytes(lambda: encoder(pixels, largest.grid), self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryShortage(
                f"the vision encoder cannot encode an image of {largest.width} x {largest.height} pixels in "
                "the memory besides the weights: lower the number of pixels in preprocessor_config.json or "
                f"--context-length, or use --images off ({error})"
            ) from error
