# SPDX-License-Identifier: Apache-2.0
"""Embeddings of images on the device, which steps compute and use by the digests of the images.

The store is a table of fixed size with a row for each embedding, so that images never need more memory than
was allocated when the engine was loaded. Rank 0 runs the encoder, and all ranks keep the embeddings.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from mizzen.core.images.types import ImageEncoding, Pixels
from mizzen.core.request import Int64
from mizzen.core.step_plan import StepPlan
from mizzen.engine.execution.encoding_timer import EncodingTimer
from mizzen.engine.uploader import Uploader
from mizzen.models.image_rows import ImageRows
from mizzen.parallel.collectives import SINGLE_RANK, Collectives


class EncodeImage(Protocol):
    """The vision encoder of a model."""

    def __call__(self, pixels: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """Return the embeddings [embeddings, width] of pixels, uint8 [tiles, height, width, 3]."""
        ...


class ImageStore:
    """Embeddings of images, in the rows of a table on the device; used from one thread and in one stream."""

    def __init__(
        self,
        table: torch.Tensor,
        encode: EncodeImage | None,
        upload: Uploader,
        ranks: Collectives = SINGLE_RANK,
    ) -> None:
        """Keep embeddings in a table.

        Args:
            table: Memory of the embeddings [capacity, width], in the model's dtype.
            encode: The encoder on rank 0; None on other ranks.
            upload: Copies arrays to the device.
            ranks: Collectives of the tensor parallel ranks.

        Raises:
            ValueError: Rank 0 has no encoder.
        """
        if encode is None and ranks.rank == 0:
            raise ValueError("rank 0 encodes images for all ranks, and needs the encoder")
        self.table = table
        self.encode = encode
        self.upload = upload
        self.ranks = ranks
        self.timer = EncodingTimer(table.device)
        """Time that the encoder runs on this rank."""
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
        for encoding in plan.encodings:
            self.add(encoding)

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

    def add(self, encoding: ImageEncoding) -> None:
        """Encode an image on rank 0, and keep its embeddings on all ranks.

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
        self.table.index_copy_(0, self.upload(rows), self.compute(encoding))

    def compute(self, encoding: ImageEncoding) -> torch.Tensor:
        """Return the embeddings of an image [embeddings, width] on every rank.

        Raises:
            ValueError: Rank 0 has no pixels, or the encoder returns another number of embeddings.
        """
        shape = (encoding.embeddings, self.table.shape[1])
        if self.encode is None:
            embeddings = self.table.new_empty(shape)
        elif encoding.pixels is None:
            raise ValueError(f"a step encodes the image {encoding.digest.hex()} without its pixels")
        else:
            with self.timer.measure():
                embeddings = self.encode(self.upload_pixels(encoding.pixels), encoding.grid)
                embeddings = embeddings.to(self.table.dtype).contiguous()
            if embeddings.shape != shape:
                raise ValueError(f"an image has embeddings of shape {tuple(embeddings.shape)}, not {shape}")
        self.ranks.broadcast(embeddings.view(torch.uint8))  # a type that all collectives support
        return embeddings

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
