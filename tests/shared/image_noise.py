# SPDX-License-Identifier: Apache-2.0
"""Image files with random pixels, and their parts of messages in OpenAI's format."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image


def encode_noise(seed: int, width: int, height: int, kind: str = "PNG") -> bytes:
    """Return an image file with seeded random pixels in RGB; `kind` is its format as Pillow names it."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, kind)
    return file.getvalue()


def data_url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def image_part(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content)}}
