# SPDX-License-Identifier: Apache-2.0
"""Images of prompts: the parts of requests and plans that describe them.

An image is identified by its digest, which covers its bytes and everything that determines its embeddings.
The prefix cache and the store of embeddings know images only by their digests.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Pixels = NDArray[np.uint8]
"""Pixels of a resized image in RGB, uint8 [tiles, height, width, 3]."""

DIGEST_BYTES = 32
"""Size of an image's digest."""


class PromptImage(Struct, frozen=True, kw_only=True):
    """An image of a request's prompt."""

    digest: bytes
    """Digest of the image, `DIGEST_BYTES` long."""
    positions: Int32
    """Indices of the prompt's tokens that its embeddings replace, in order, int32 [embeddings], ascending."""
    grid: tuple[int, int, int]
    """Frames, rows and columns; see `mizzen.images.types.ImageGeometry.grid`."""


class MissingImages(Struct, frozen=True):
    """Images whose pixels the scheduler needs before it can compute a request's prompt."""

    rid: int
    digests: tuple[bytes, ...]


class ImageEncoding(Struct, frozen=True, kw_only=True):
    """Run of the image encoder in a step, whose embeddings are kept until a plan drops them."""

    digest: bytes
    grid: tuple[int, int, int]
    embeddings: int
    """Number of embeddings of the image."""
    pixels: Pixels | None = None
    """Pixels on rank 0, which encodes images for all ranks; None on other ranks, and if the encoder's first
    layers ran in an earlier step."""
    layers: tuple[int, int] | None = None
    """Layers of the encoder that the step runs, from the first to the end (exclusive); None for all of them.
    The steps of a divided encoding run all layers in order, and have no other encodings. If another encoding
    begins between them, the result of the layers that have run is dropped, and the image begins at layer 0
    again."""
    last: bool = True
    """Whether the embeddings are complete after the step, and kept."""


class ChunkImage(Struct, frozen=True, kw_only=True):
    """Embeddings of an image that replace tokens of a prefill chunk."""

    digest: bytes
    first: int
    """Index of the first of these embeddings among those of the image."""
    offsets: Int32
    """Indices within the chunk of the tokens that are replaced, in order, int32 [n]."""
