# SPDX-License-Identifier: Apache-2.0
"""Embeddings of images on the device, which steps compute and use by the digests of the images.

The store is a table of fixed size with a row for each embedding, so that images never need more memory than
was allocated when the engine was loaded. Rank 0 runs the encoder, and all ranks keep the embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from mizzen.core.images.types import ImageEncoding, Pixels
from mizzen.core.request import Int64
from mizzen.core.step_plan import StepPlan
from mizzen.engine.execution.encoding_timer import EncodingTimer
from mizzen.engine.uploader import Uploader
from mizzen.models.image_rows import ImageRows
from mizzen.models.vision.config import CHANNELS
from mizzen.parallel.collectives import SINGLE_RANK, Collectives


class ImageEncoder(Protocol):
    """The vision encoder of a model; see `mizzen.models.vision.encoder.VisionEncoder`."""

    def encode(self, images: Sequence[tuple[torch.Tensor, tuple[int, int, int]]]) -> Sequence[torch.Tensor]:
        """Return the embeddings [embeddings, width] of each image, computed together.

        An image is given by its pixels, uint8 [tiles, height, width, 3], and its grid.
        """
        ...

    def begin(self, images: Sequence[tuple[torch.Tensor, tuple[int, int, int]]]) -> Any:
        """Return an encoding before its first layer; see `encode`."""
        ...

    def run_layers(self, running: Any, end: int) -> None:
        """Run the next layers of an encoding, up to the layer `end` (exclusive)."""
        ...

    def end(self, running: Any) -> Sequence[torch.Tensor]:
        """Return the embeddings of each image after the last layer."""
        ...


class ImageStore:
    """Embeddings of images, in the rows of a table on the device; used from one thread and in one stream."""

    def __init__(
        self,
        table: torch.Tensor,
        encoder: ImageEncoder | None,
        upload: Uploader,
        ranks: Collectives = SINGLE_RANK,
        *,
        max_pixels: int = 0,
    ) -> None:
        """Keep embeddings in a table.

        Args:
            table: Memory of the embeddings [capacity, width], in the model's dtype.
            encoder: The encoder on rank 0; None on other ranks.
            upload: Copies arrays to the device.
            ranks: Collectives of the tensor parallel ranks.
            max_pixels: Maximum number of pixels of several images that are encoded together; their memory is
                that of one image with as many pixels.

        Raises:
            ValueError: Rank 0 has no encoder.
        """
        if encoder is None and ranks.rank == 0:
            raise ValueError("rank 0 encodes images for all ranks, and needs the encoder")
        self.table = table
        self.encoder = encoder
        self.upload = upload
        self.ranks = ranks
        self.max_pixels = max_pixels
        self.timer = EncodingTimer(table.device)
        """Time that the encoder runs on this rank."""
        self.running: Any = None
        """Encoding whose first layers have run on rank 0. It is dropped when another one begins, so that
        they never need memory at once."""
        self.free_rows = np.arange(len(table))[::-1].copy()
        """Rows of the table, int64 [capacity]; the first `free_count` of them are free."""
        self.free_count = len(table)
        self.rows_by_digest: dict[bytes, Int64] = {}

    def update(self, plan: StepPlan) -> None:
        """Drop embeddings of images, then compute others; a collective call if the plan encodes images.

        Raises:
            ValueError: The plan drops an unknown image, encodes a known one or exceeds the capacity.
        """
        for digest in plan.dropped_images:
            self.drop(digest)
        if plan.encodings:
            self.add(plan.encodings)

    def drop(self, digest: bytes) -> None:
        """Free the rows of an image.

        Raises:
            ValueError: There is no such image.
        """
        rows = self.rows_by_digest.pop(digest, None)
        if rows is None:
            raise ValueError(f"a step drops the image {digest.hex()}, which is not stored")
        self.free_rows[self.free_count : self.free_count + len(rows)] = rows
        self.free_count += len(rows)

    def add(self, encodings: Sequence[ImageEncoding]) -> None:
        """Encode images on rank 0, and keep their embeddings on all ranks.

        Raises:
            ValueError: An image is stored already, there is no room for it, rank 0 has no pixels, or the
                encoder returns another number of embeddings.
        """
        if len(encodings) > 1 and any(encoding.layers is not None for encoding in encodings):
            raise ValueError("a step with a part of an encoding has other encodings")
        completed = [encoding for encoding in encodings if encoding.last]
        if not completed:
            for encoding in encodings:
                self.run_layers(encoding)
            return
        for encoding in completed:
            self.reserve_rows(encoding)
        for encoding, embeddings in zip(completed, self.encode_images(completed), strict=True):
            self.ranks.broadcast(embeddings.view(torch.uint8))  # a type that all collectives support
            self.table.index_copy_(0, self.upload(self.rows_by_digest[encoding.digest]), embeddings)

    def reserve_rows(self, encoding: ImageEncoding) -> None:
        """Choose the rows of an image.

        Raises:
            ValueError: The image is stored already, or there is no room for it.
        """
        count = encoding.embeddings
        if encoding.digest in self.rows_by_digest:
            raise ValueError(f"a step encodes the image {encoding.digest.hex()}, which is stored already")
        if count > self.free_count:
            raise ValueError(
                f"a step encodes an image of {count} embeddings, and {self.free_count} of the store's "
                f"{len(self.table)} are free"
            )
        self.free_count -= count
        rows = self.free_rows[self.free_count : self.free_count + count].copy()
        self.rows_by_digest[encoding.digest] = rows

    def encode_images(self, encodings: Sequence[ImageEncoding]) -> Iterator[torch.Tensor]:
        """Yield the embeddings [embeddings, width] of each image on rank 0; empty memory on other ranks.

        Args:
            encodings: Whole encodings, or only the last part of a divided one.

        Raises:
            ValueError: Rank 0 has no pixels, or the encoder returns another number of embeddings.
        """
        encoder = self.encoder
        if encoder is None:
            for encoding in encodings:
                yield self.table.new_empty(encoding.embeddings, self.table.shape[1])
        elif encodings[0].layers is not None:
            yield from self.check_embeddings(encodings, self.run_layers(encodings[0]))
        else:
            for group in self.group_by_pixels(encodings):
                self.running = None
                images = [(self.upload_pixels(pixels), encoding.grid) for encoding, pixels in group]
                with self.timer.measure():
                    encoded = encoder.encode(images)
                yield from self.check_embeddings([encoding for encoding, _ in group], encoded)

    def run_layers(self, encoding: ImageEncoding) -> Sequence[torch.Tensor]:
        """Run some layers of a divided encoding on rank 0.

        Returns:
            The image's embeddings if they are complete, else nothing.

        Raises:
            ValueError: The encoding has no pixels for the first layer.
        """
        encoder, layers = self.encoder, encoding.layers
        if encoder is None or layers is None:
            return ()
        begin, end = layers
        if not begin:
            self.running = None
            [[(_, pixels)]] = self.group_by_pixels([encoding])
            images = [(self.upload_pixels(pixels), encoding.grid)]
            with self.timer.measure():
                self.running = encoder.begin(images)
        if self.running is None:
            raise ValueError(f"no layer of the image {encoding.digest.hex()} has run before layer {begin}")
        running = self.running
        with self.timer.measure():
            encoder.run_layers(running, end)
            if not encoding.last:
                return ()
            self.running = None
            return encoder.end(running)

    def check_embeddings(
        self, encodings: Sequence[ImageEncoding], encoded: Sequence[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Yield the embeddings of images that the encoder has returned, in the dtype of the table.

        Raises:
            ValueError: An image has another number of embeddings.
        """
        for encoding, embeddings in zip(encodings, encoded, strict=True):
            shape = (encoding.embeddings, self.table.shape[1])
            if embeddings.shape != shape:
                raise ValueError(f"an image has embeddings of shape {tuple(embeddings.shape)}, not {shape}")
            yield embeddings.to(self.table.dtype).contiguous()

    def group_by_pixels(
        self, encodings: Sequence[ImageEncoding]
    ) -> Iterator[list[tuple[ImageEncoding, Pixels]]]:
        """Yield images with their pixels, in groups of at most `max_pixels` pixels or of one image.

        Raises:
            ValueError: An image has no pixels.
        """
        group: list[tuple[ImageEncoding, Pixels]] = []
        total = 0
        for encoding in encodings:
            if encoding.pixels is None:
                raise ValueError(f"a step encodes the image {encoding.digest.hex()} without its pixels")
            count = encoding.pixels.size // CHANNELS
            if group and total + count > self.max_pixels:
                yield group
                group, total = [], 0
            group.append((encoding, encoding.pixels))
            total += count
        if group:
            yield group

    def upload_pixels(self, pixels: Pixels) -> torch.Tensor:
        """Copy pixels to the device; PyTorch needs an array that may be written."""
        return self.upload(np.require(pixels, requirements=["C", "W"]))

    def find_rows(self, plan: StepPlan) -> Int64:
        """Return the rows of the embeddings that a plan's chunks use, in their order, int64 [n].

        Raises:
            ValueError: A chunk uses an image that is not stored, or more embeddings than it has.
        """
        parts: list[Int64] = []
        for image in (image for chunk in plan.prefill for image in chunk.images):
            rows = self.rows_by_digest.get(image.digest)
            if rows is None:
                raise ValueError(f"a step uses the image {image.digest.hex()}, which is not stored")
            end = image.first + len(image.offsets)
            if end > len(rows):
                raise ValueError(f"a step uses embedding {end - 1} of an image that has {len(rows)}")
            parts.append(rows[image.first : end])
        return np.concatenate(parts)

    def gather_rows(self, plan: StepPlan, batch_rows: Int64) -> ImageRows:
        """Return the embeddings that a plan's chunks use.

        Args:
            plan: The plan, which has images.
            batch_rows: Rows of the batch that they replace, int64 [n].

        Raises:
            ValueError: A chunk uses an image that is not stored, or more embeddings than it has.
        """
        batch, table_rows = self.upload.upload_together(batch_rows, self.find_rows(plan))
        return ImageRows(batch, self.table.index_select(0, table_rows))
