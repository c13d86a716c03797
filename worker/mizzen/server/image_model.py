# SPDX-License-Identifier: Apache-2.0
"""A model's rules for images, as the wire needs them to validate requests and check digests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mizzen.core.images.types import PromptImage
from mizzen.engine.images.pending import ImageFile
from mizzen.images.digest import image_digest
from mizzen.images.rotary import rotary_positions
from mizzen.images.rules import load_image_rules
from mizzen.images.types import ImageGeometry, ImageRules, PixelLimits
from mizzen.wire.messages import ImageReference
from mizzen.wire.server.image_transfers import ReceivedImage
from mizzen.wire.server.image_validation import ImageShape, PlacedImages
from mizzen.wire.server.invalid_request import InvalidImages


@dataclass(frozen=True, slots=True)
class RulesImageModel:
    """Implementation of `mizzen.wire.server.image_validation.ImageModel` by the rules of a model."""

    rules: ImageRules

    @property
    def placeholder_id(self) -> int:
        """Token id of the placeholders."""
        return self.rules.placeholder_id

    def measure(self, reference: ImageReference) -> ImageShape:
        """Return the grid of an image and the number of its embeddings.

        Raises:
            ValueError: the model does not accept the size or the bounds of its pixels.
        """
        geometry = self._geometry(reference)
        return ImageShape(geometry.grid, geometry.embeddings)

    def place(self, images: tuple[PromptImage, ...], prompt_tokens: int) -> PlacedImages:
        """Return images of a prompt together with the rotary positions that follow from them.

        Raises:
            InvalidImages: the tokens of an image are not adjacent, as rotary positions require.
        """
        if self.rules.rotary_merge:
            for number, image in enumerate(images, 1):
                if image.positions[-1] - image.positions[0] >= len(image.positions):
                    raise InvalidImages(f"images: the positions of image {number} must be adjacent")
        rotary = rotary_positions(images, prompt_tokens, self.rules)
        if rotary is None:
            return PlacedImages(images)
        return PlacedImages(images, rotary.positions, rotary.offset)

    def hash_content(self, reference: ImageReference, content: bytes) -> bytes:
        """Return the digest of the image that has these bytes.

        Raises:
            ValueError: the model does not accept the size of the reference.
        """
        return image_digest(content, self.rules, self._geometry(reference))

    def _geometry(self, reference: ImageReference) -> ImageGeometry:
        return self.rules.geometry(reference.width, reference.height, pixel_limits(reference))


def image_file(image: ReceivedImage) -> ImageFile:
    """Return a received image as the engine takes it."""
    reference = image.reference
    return ImageFile(
        rid=image.rid,
        digest=reference.digest,
        content=image.content,
        size=(reference.width, reference.height),
        limits=pixel_limits(reference),
    )


def require_image_rules(folder: Path) -> ImageRules:
    """Return the rules for images of the model in a folder.

    Raises:
        ValueError: the model takes no images, or a file of the folder is invalid.
    """
    rules = load_image_rules(folder)
    if rules is None:
        raise ValueError(f"--model {folder}: the model takes no images that are supported")
    return rules


def pixel_limits(reference: ImageReference) -> PixelLimits | None:
    """Return the bounds of the number of pixels that a request sets; None if it sets none."""
    if reference.min_pixels is None and reference.max_pixels is None:
        return None
    return PixelLimits(reference.min_pixels, reference.max_pixels)
