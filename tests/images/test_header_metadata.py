# SPDX-License-Identifier: Apache-2.0
"""Sizes agree with Pillow for files with all kinds of metadata, and for damaged files that Pillow opens."""

from __future__ import annotations

import io
import random
from collections import Counter

import pytest
from metadata_files import damage, random_gif, random_jpeg, random_png, random_webp
from PIL import Image, ImageOps

from mizzen.images.header import read_header
from mizzen.images.types import InvalidImage

MAKERS = {"jpeg": random_jpeg, "png": random_png, "webp": random_webp, "gif": random_gif}


def displayed_size(content: bytes) -> tuple[int, int] | None:
    """Return the size by Pillow; None if Pillow cannot open or load the file, or if it is large."""
    try:
        image = Image.open(io.BytesIO(content), formats=("JPEG", "PNG", "WEBP", "GIF"))
        return None if image.width * image.height > 4_000_000 else ImageOps.exif_transpose(image).size
    except Exception:  # Pillow and its decoders raise many types
        return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MAKERS)
def test_sizes_agree_for_all_metadata(kind: str) -> None:
    source = random.Random(11)
    sizes: Counter[tuple[int, int]] = Counter()
    for _ in range(1500):
        content = MAKERS[kind](source)
        expected = displayed_size(content)
        if expected is not None:
            header = read_header(content)
            assert (header.width, header.height) == expected, content
            sizes[expected] += 1
    assert sizes[7, 4] > 300
    assert sizes[4, 7] > 300 or kind == "gif"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MAKERS)
def test_damaged_files_that_pillow_opens_have_the_same_size(kind: str) -> None:
    source = random.Random(12)
    opened = refused = 0
    for _ in range(3000):
        content = damage(MAKERS[kind](source), source)
        expected = displayed_size(content)
        try:
            header = read_header(content)
        except InvalidImage:
            assert expected is None, content
            refused += 1
            continue
        if expected is not None:
            assert (header.width, header.height) == expected, content
            opened += 1
    assert opened > 200
    assert refused > 200
