# SPDX-License-Identifier: Apache-2.0
"""Parts of requests with images, and the configurations of small models that read images."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

LISTS_ONLY = (
    "{% for message in messages %}{{ message.role | upper }}: {% for part in message['content'] | "
    "selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}{% for part in message['content'] | "
    "selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
"""Chat template of LLaVA's processors in Transformers."""
TEXT_ONLY = (
    "{% for message in messages %}{{ message.role | upper }}: {{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
QWEN_CONFIG = {
    "model_type": "qwen2_5_vl",
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2},
}
QWEN_PREPROCESSOR = {"min_pixels": 3136, "max_pixels": 1003520}


def png(width: int, height: int, color: str = "red") -> bytes:
    """Return a PNG file."""
    out = io.BytesIO()
    Image.new("RGB", (width, height), color).save(out, "PNG")
    return out.getvalue()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    """Return a `data:` URL for a file."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def image_part(content: bytes, **more: Any) -> dict[str, Any]:
    """Return the part of a chat message for an image file."""
    return {"type": "image_url", "image_url": {"url": data_url(content), **more}}
