# SPDX-License-Identifier: Apache-2.0
"""Prompts of `LLM.chat`: conversations, possibly with images, as token ids of a model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mizzen.gateway.images.data_url import decode_data_url, is_data_url
from mizzen.gateway.text.image_marks import new_mark
from mizzen.gateway.text.template import ChatTemplate
from mizzen.gateway.text.tokenizer import Tokenizer, read_files
from mizzen.images.types import ImageRules
from mizzen.offline.image_prompts import ImagePrompt, ImageSource

Message = Mapping[str, Any]
MAX_IMAGE_BYTES = 256 << 20
"""Maximum size of the file in a `data:` URL."""


class ConversationEncoder:
    """Renders and tokenizes conversations as the gateway does, so that both get the same answers.

    Text that spells the placeholder of an image stays text.
    """

    def __init__(self, folder: str, rules: ImageRules | None) -> None:
        """Load the chat template and the tokenizer.

        Args:
            folder: Folder of the model.
            rules: Rules for images; None if the model reads text only.

        Raises:
            ValueError: the model has no chat template, or its files are invalid.
        """
        files = read_files(Path(folder))
        mark = None if rules is None else new_mark(rules.placeholder)
        template = ChatTemplate.from_files(files, mark)
        if template is None:
            raise ValueError(f"{folder} has no chat template")
        self._template = template
        self._tokenizer = Tokenizer.from_files(files, mark)

    def encode(self, index: int, messages: Sequence[Message]) -> ImagePrompt:
        """Return the token ids of a conversation and its images.

        Raises:
            ValueError: a part of a message is invalid, or the template rejects the messages; the error of a
                part has the conversation's `index`.
        """
        images: list[ImageSource] = []
        try:
            read = [_read_message(message, images) for message in messages]
        except ValueError as error:
            raise ValueError(f"conversation {index}: {error}") from None
        # A rendered template contains its special tokens.
        ids = self._tokenizer.encode(self._template.render(read), add_special_tokens=False)
        return ImagePrompt(ids, images)


def _read_message(message: Message, images: list[ImageSource]) -> dict[str, Any]:
    """Return a message in the form of chat templates; its images are appended to `images`."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": [_read_part(part, images) for part in content]}


def _read_part(part: Mapping[str, Any], images: list[ImageSource]) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "image_url":
        images.append(_read_url(part.get("image_url")))
    elif kind == "image":
        source = part.get("image")
        if not isinstance(source, bytes | str | Path):
            raise ValueError("a part of type image needs a file or a path in image")
        images.append(source)
    else:
        return dict(part)
    return {"type": "image"}


def _read_url(value: Any) -> bytes:
    """Return the file in the `data:` URL of a part.

    Raises:
        ValueError: it has another URL, a `detail` that changes the image's size, or no valid Base64.
    """
    url, detail = (value.get("url"), value.get("detail")) if isinstance(value, Mapping) else (value, None)
    if detail not in (None, "auto", "high"):
        raise ValueError(f"detail {detail!r} is not supported here: resize the image, or omit detail")
    if not isinstance(url, str) or not is_data_url(url):
        raise ValueError(
            "image_url must be a data: URL, as nothing is fetched here; or give a file or its path with "
            '{"type": "image", "image": …}'
        )
    return decode_data_url(url, MAX_IMAGE_BYTES)
