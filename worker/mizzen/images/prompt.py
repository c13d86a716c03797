# SPDX-License-Identifier: Apache-2.0
"""Replaces the placeholders of images in prompts by one token for each embedding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mizzen.core.request import Int32
from mizzen.images.types import ImageGeometry, ImageRules, InvalidImage


def expand_placeholders(
    ids: Int32, geometries: Sequence[ImageGeometry], rules: ImageRules
) -> tuple[Int32, tuple[Int32, ...]]:
    """Replace the placeholder of each image by the expansion for its geometry.

    Args:
        ids: token ids of a rendered prompt, int32 [n], with one placeholder for each image.
        geometries: geometries of the images, in order.
        rules: the model's rules.

    Returns:
        The new token ids, int32 [m], and for each image the indices of its embeddings among them, int32
        [embeddings].

    Raises:
        InvalidImage: the prompt has more or fewer placeholders than images.
    """
    (places,) = np.nonzero(ids == rules.placeholder_id)
    if len(places) != len(geometries):
        raise InvalidImage(
            f"the prompt has {len(places)} placeholders {rules.placeholder} for {len(geometries)} images: "
            "there must be one for each image, and none in texts"
        )
    parts: list[Int32] = []
    positions: list[Int32] = []
    length = previous = 0
    for place, geometry in zip(places.tolist(), geometries, strict=True):
        expansion = rules.expansion(geometry)
        (offsets,) = np.nonzero(expansion == rules.placeholder_id)
        parts += [ids[previous:place], expansion]
        length += place - previous
        positions.append((offsets + length).astype(np.int32))
        length += len(expansion)
        previous = place + 1
    return np.concatenate([*parts, ids[previous:]]).astype(np.int32, copy=False), tuple(positions)
