# SPDX-License-Identifier: Apache-2.0
"""Validates the images of a `Generate` message, and converts them to those of a scheduler request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mizzen.core.images.types import DIGEST_BYTES, PromptImage
from mizzen.core.request import Int32
from mizzen.wire.messages import MAX_IMAGE_BYTES, MAX_IMAGES, MAX_REQUEST_IMAGE_BYTES, ImageReference
from mizzen.wire.server.invalid_request import InvalidImages

MAX_SIDE = 2**20
"""Maximum width and height of an image in pixels, a bound for arithmetic; models have smaller ones."""
MAX_PIXELS = 2**40


@dataclass(frozen=True, slots=True)
class ImageShape:
    """Shape of an image as the model sees it."""

    grid: tuple[int, int, int]
    """Frames, rows and columns; see `mizzen.core.images.types.PromptImage.grid`."""
    embeddings: int


@dataclass(frozen=True, slots=True)
class PlacedImages:
    """Images of a scheduler request, with the fields that depend on them; see `Request`."""

    images: tuple[PromptImage, ...] = ()
    rotary: Int32 | None = None
    rotary_offset: int = 0


class ImageModel(Protocol):
    """The parts of a model's rules for images that the wire needs."""

    @property
    def placeholder_id(self) -> int:
        """Token id of the placeholders that embeddings replace."""
        ...

    def measure(self, reference: ImageReference) -> ImageShape:
        """Return the shape of an image.

        Raises:
            ValueError: the model does not accept the size; the text names the bound.
        """
        ...

    def place(self, images: tuple[PromptImage, ...], prompt_tokens: int) -> PlacedImages:
        """Return images of a prompt together with the rotary positions that follow from them."""
        ...

    def hash_content(self, reference: ImageReference, content: bytes) -> bytes:
        """Return the digest of the image that has these bytes; called in a thread.

        Raises:
            ValueError: the image cannot have a digest.
        """
        ...


def read_images(references: Sequence[ImageReference], prompt: Int32, model: ImageModel) -> PlacedImages:
    """Return the images of a request whose prompt is `prompt`, int32 [n].

    Raises:
        InvalidImages: a reference is invalid, or does not fit the prompt.
    """
    if len(references) > MAX_IMAGES:
        raise InvalidImages(f"images has {len(references)} entries; at most {MAX_IMAGES} are allowed")
    for number, reference in enumerate(references, 1):
        _check_fields(number, reference)
    total = sum(reference.size for reference in references)
    if total > MAX_REQUEST_IMAGE_BYTES:
        raise InvalidImages(
            f"images have {total} bytes together; at most {MAX_REQUEST_IMAGE_BYTES} are allowed"
        )
    _check_repeated(references)
    images: list[PromptImage] = []
    start = 0
    for number, reference in enumerate(references, 1):
        image = _read_image(number, reference, prompt, start, model)
        start = int(image.positions[-1]) + 1
        images.append(image)
    return model.place(tuple(images), len(prompt))


def _check_fields(number: int, reference: ImageReference) -> None:
    if len(reference.digest) != DIGEST_BYTES:
        raise InvalidImages(
            f"images: image {number} has a digest of {len(reference.digest)} bytes, not {DIGEST_BYTES}"
        )
    if not 0 < reference.size <= MAX_IMAGE_BYTES:
        raise InvalidImages(
            f"images: image {number} has {reference.size} bytes; 1 to {MAX_IMAGE_BYTES} are allowed"
        )
    if not (0 < reference.width <= MAX_SIDE and 0 < reference.height <= MAX_SIDE):
        raise InvalidImages(
            f"images: image {number} has {reference.width} x {reference.height} pixels; "
            f"each side must have 1 to {MAX_SIDE}"
        )
    low, high = reference.min_pixels, reference.max_pixels
    if not all(bound is None or 0 < bound <= MAX_PIXELS for bound in (low, high)):
        raise InvalidImages(f"images: image {number} has bounds of {low} and {high} pixels")


def _check_repeated(references: Sequence[ImageReference]) -> None:
    """Check that references with the same digest describe the same file, which is fetched only once."""
    known: dict[bytes, tuple[int, ...]] = {}
    for number, reference in enumerate(references, 1):
        source = reference.size, reference.width, reference.height
        if known.setdefault(reference.digest, source) != source:
            raise InvalidImages(f"images: image {number} has the digest of an earlier one, but another size")


def _read_image(
    number: int, reference: ImageReference, prompt: Int32, start: int, model: ImageModel
) -> PromptImage:
    """Return an image whose positions begin at `start` or later.

    Raises:
        InvalidImages: the model does not accept the size, or the positions are not those of its placeholders.
    """
    if len(reference.positions) % 4:
        raise InvalidImages(
            f"images: the positions of image {number} have {len(reference.positions)} bytes, not a multiple "
            "of 4 (int32)"
        )
    positions = np.frombuffer(reference.positions, dtype="<i4")
    try:
        shape = model.measure(reference)
    except ValueError as error:
        raise InvalidImages(f"images: image {number}: {error}") from None
    if len(positions) != shape.embeddings or not len(positions):
        raise InvalidImages(
            f"images: image {number} has {len(positions)} positions, but {shape.embeddings} embeddings"
        )
    if positions[0] < start or positions[-1] >= len(prompt) or (np.diff(positions) <= 0).any():
        raise InvalidImages(
            f"images: the positions of image {number} must ascend between {start} and {len(prompt) - 1}"
        )
    if (prompt[positions] != model.placeholder_id).any():
        raise InvalidImages(
            f"images: the prompt has other tokens than the placeholder {model.placeholder_id} at positions "
            f"of image {number}"
        )
    return PromptImage(digest=reference.digest, positions=positions, grid=shape.grid)
