# SPDX-License-Identifier: Apache-2.0
"""Prompts with images for `LLM`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mizzen.core.images.types import PromptImage
from mizzen.core.request import Int32
from mizzen.engine.images.pending import ImageFile
from mizzen.images.digest import image_digest
from mizzen.images.header import read_header
from mizzen.images.prompt import expand_placeholders
from mizzen.images.rotary import RotaryPositions, rotary_positions
from mizzen.images.types import ImageGeometry, ImageRules, InvalidImage

ImageSource = bytes | str | Path
"""An image file as bytes, or the path of the file."""


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt with images for `LLM.generate`."""

    prompt: str | Sequence[int]
    """Text or token ids, with one placeholder of the model (such as `<|image_pad|>` or `<image>`) for each
    image."""
    images: Sequence[ImageSource] = ()
    """Images in the order of their placeholders: files in JPEG, PNG, WebP or GIF, or their paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedImages:
    """Images of a prompt, and their files until the engine needs them."""

    ids: Int32
    """Token ids of the prompt, with a token for each embedding, int32 [n]."""
    images: tuple[PromptImage, ...] = ()
    rotary: RotaryPositions | None = None
    files: Mapping[bytes, ImageFile] = field(default_factory=dict)
    """Files by digest; `ImageFile.rid` is not set yet."""


def prepare_images(ids: Int32, sources: Sequence[ImageSource], rules: ImageRules) -> PreparedImages:
    """Read the headers of a prompt's images, and replace the placeholders in its token ids (int32 [n]).

    Raises:
        InvalidImage: a file is not an image, the model does not accept its size, or the number of
            placeholders is not that of the images.
        OSError: a file cannot be read.
    """
    contents = [source if isinstance(source, bytes) else Path(source).read_bytes() for source in sources]
    files: list[ImageFile] = []
    geometries: list[ImageGeometry] = []
    for index, content in enumerate(contents):
        try:
            header = read_header(content)
            geometries.append(geometry := rules.geometry(header.width, header.height))
        except InvalidImage as error:
            raise InvalidImage(f"image {index}: {error}") from None
        digest = image_digest(content, rules, geometry)
        files.append(ImageFile(rid=0, digest=digest, content=content, size=(header.width, header.height)))
    expanded, positions = expand_placeholders(ids, geometries, rules)
    images = tuple(
        PromptImage(digest=file.digest, positions=places, grid=geometry.grid)
        for file, places, geometry in zip(files, positions, geometries, strict=True)
    )
    return PreparedImages(
        ids=expanded,
        images=images,
        rotary=rotary_positions(images, len(expanded), rules),
        files={file.digest: file for file in files},
    )
