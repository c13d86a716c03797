# SPDX-License-Identifier: Apache-2.0
"""Allocates the encoder of images and the store of embeddings.

The loader calls it on every rank. Only rank 0 has the encoder.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.image_store import ImageStore
from mizzen.engine.loading.memory_budget import MemoryShortage
from mizzen.engine.loading.memory_need import MemoryNeed
from mizzen.engine.loading.memory_profile import measure_peak_bytes
from mizzen.engine.loading.model_setup import DUMMY_SEED, measure_targets, zeros
from mizzen.engine.loading.resolve import uses_own_kernels
from mizzen.engine.loading.served_images import ServedImages, count_pixels, estimate_encoding_bytes
from mizzen.engine.loading.vision_setup import load_vision_encoder
from mizzen.engine.uploader import Uploader
from mizzen.layers.context import BuildContext
from mizzen.models.served_model import ServedModel
from mizzen.models.vision.encoder import VisionEncoder
from mizzen.parallel.collectives import SINGLE_RANK
from mizzen.parallel.process_group import RankGroup


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
                BuildContext(device=weight.device, dtype=weight.dtype, fused=uses_own_kernels(options)),
                images.vision,
                dummy_seed=DUMMY_SEED if options.load_format == "dummy" else None,
            )
        table = zeros((images.capacity, images.width), weight.dtype, weight.device)
        ranks = group.collectives if group else SINGLE_RANK
        self.store = ImageStore(
            table, self.encoder, self.upload, ranks, max_pixels=count_pixels(images.largest)
        )
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
        pixels = self.upload(np.zeros(largest.pixel_shape, np.uint8))
        try:
            return measure_peak_bytes(lambda: encoder(pixels, largest.grid), self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryShortage(
                f"the vision encoder cannot encode an image of {largest.width} x {largest.height} pixels in "
                "the memory besides the weights: lower the number of pixels in preprocessor_config.json or "
                f"--context-length, or use --images off ({error})"
            ) from error
