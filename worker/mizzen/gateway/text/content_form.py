# SPDX-License-Identifier: Apache-2.0
"""Content of messages with images, in the form in which a chat template shows it.

Templates of models for images differ: most accept text and lists of parts, those of LLaVA and Idefics only
lists, and templates of text models only text. `detect_content_form` renders short conversations in each form,
and `arrange_contents` brings a conversation into the detected form. A template that does not know images gets
the mark of an image (`image_marks`) as a part of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mizzen.gateway.text.image_marks import ImageMark

TemplateMessage = dict[str, Any]
Render = Callable[[list[TemplateMessage]], str | None]
"""Function that renders a conversation; it returns None if the template rejects the conversation."""

IMAGE_PART: Mapping[str, str] = {"type": "image"}
"""Part of a message's content that stands for an image."""
_TEXT = "text beside the image"
_PARTS: tuple[Mapping[str, Any], ...] = (IMAGE_PART, {"type": "image_url", "image_url": {"url": ""}})


@dataclass(frozen=True, slots=True)
class ContentForm:
    """Form of the content in which a chat template shows text and images."""

    image_part: Mapping[str, Any] | None = None
    """Part that the template shows as an image; None if images become marks in the text."""
    lists_only: bool = False
    """True if the template shows text only in lists of parts."""
    results: bool = False
    """True if the template shows images in the results of tool calls."""


def detect_content_form(render: Render, mark: ImageMark) -> ContentForm:
    """Return the form in which a template shows images; `render` renders a conversation with it."""
    for part in _PARTS:
        content = [dict(part), {"type": "text", "text": _TEXT}]
        text = render([{"role": "user", "content": content}])
        if text is not None and text.count(mark.text) == 1 and _TEXT in text:
            plain = render([{"role": "user", "content": _TEXT}])
            return ContentForm(
                part,
                lists_only=plain is None or _TEXT not in plain,
                results=_shows_image_in_result(render, content, mark),
            )
    return ContentForm(results=True)


def _shows_image_in_result(render: Render, content: list[dict[str, Any]], mark: ImageMark) -> bool:
    call = {"id": "probe0001", "type": "function", "function": {"name": "probe", "arguments": {}}}
    text = render(
        [
            {"role": "user", "content": [{"type": "text", "text": "question"}]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": content, "name": "probe", "tool_call_id": "probe0001"},
        ]
    )
    return text is not None and text.count(mark.text) == 1 and _TEXT in text


def arrange_contents(
    messages: Sequence[TemplateMessage], form: ContentForm, mark: ImageMark
) -> list[TemplateMessage]:
    """Return a conversation whose contents have a certain form.

    Contents are text, or lists of parts of type `text` and `image`.
    """
    return [
        {**message, "content": _arrange_content(message["content"], form, mark)}
        if "content" in message
        else message
        for message in messages
    ]


def _arrange_content(content: Any, form: ContentForm, mark: ImageMark) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form.lists_only else content
    if not isinstance(content, list):
        return content
    if form.image_part is None:
        return "\n".join(part["text"] if part["type"] == "text" else mark.text for part in content)
    return [dict(form.image_part) if part["type"] == "image" else part for part in content]


def has_image(message: Mapping[str, Any]) -> bool:
    """Return whether a message in the form of chat templates has an image."""
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type") == "image" for part in content)
