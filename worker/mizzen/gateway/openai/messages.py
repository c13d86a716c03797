# SPDX-License-Identifier: Apache-2.0
"""Chat messages: their JSON schema, and their conversion for chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mizzen.gateway.errors import invalid
from mizzen.gateway.fields.rules import unsupported_field
from mizzen.gateway.images.limits import ImagePartError
from mizzen.gateway.images.request_images import ImageCollector, ImageSource
from mizzen.gateway.text.template import REASONING_FIELDS
from mizzen.gateway.tools.tool_schemas import CalledFunction, ToolCall

UNSUPPORTED_PARTS = ("input_audio", "file", "audio_url", "video_url")
IMAGE_ROLES = ("user", "tool", "function")
"""Roles of the messages that may have images."""


class ImageUrl(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Image, as a `data:` URL or as an address from which the gateway fetches it."""

    url: Annotated[
        str,
        Meta(
            description="`data:image/png;base64,…` with a JPEG, PNG, WebP or GIF file (its first frame), or "
            "an `https:` URL if the gateway allows it."
        ),
    ]
    detail: Annotated[
        Literal["low", "auto", "high"] | None,
        Meta(description="`low`: the image is resized to at most 512 x 512 pixels. Others have no effect."),
    ] = None


class Part(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Part of a message's content."""

    type: Annotated[
        str,
        Meta(
            description="`text`; `image_url` in a message of the user or a tool, if the model reads images; "
            "`refusal` in an assistant's message. Other types are rejected."
        ),
    ]
    text: Annotated[str | None, Meta(description="With type `text`: the text.")] = None
    refusal: Annotated[str | None, Meta(description="With type `refusal`: text of the refusal.")] = None
    image_url: Annotated[
        ImageUrl | str | None, Meta(description="With type `image_url`: the image, or only its URL.")
    ] = None
    input_audio: Annotated[Any, Meta(description="Not supported.")] = None
    audio_url: Annotated[Any, Meta(description="Not supported.")] = None
    video_url: Annotated[Any, Meta(description="Not supported.")] = None
    file: Annotated[Any, Meta(description="Not supported.")] = None


class ImagePart(Part, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Image that was converted from another API."""

    source: ImageSource


class Message(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Message of a conversation."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        Meta(description="Author of the message; templates receive `developer` as `system`."),
    ]
    content: Annotated[
        str | list[Part] | None,
        Meta(
            description="Text, or parts. Text parts are joined by line breaks; if there are images, the chat "
            "template gets the parts in their order."
        ),
    ] = None
    name: Annotated[str | None, Meta(description="Passed to the template.")] = None
    tool_calls: Annotated[
        list[ToolCall] | None, Meta(description="Calls made by the assistant; `content` may then be missing.")
    ] = None
    tool_call_id: Annotated[str | None, Meta(description="Id of the call that a tool message answers.")] = (
        None
    )
    reasoning_content: Annotated[str | None, Meta(description="Reasoning of the assistant.")] = None
    reasoning: Annotated[str | None, Meta(description="Same as `reasoning_content`.")] = None
    thinking: Annotated[str | None, Meta(description="Same as `reasoning_content`.")] = None
    refusal: Annotated[
        str | None, Meta(description="Refusal by the assistant; used as content if `content` is missing.")
    ] = None
    function_call: Annotated[CalledFunction | None, Meta(description="Older form of `tool_calls`.")] = None
    audio: Annotated[Any, Meta(description="Not supported.")] = None
    annotations: Annotated[Any, Meta(description="Ignored: it describes an earlier answer.")] = None


def template_messages(
    messages: Sequence[Message], images: ImageCollector | None = None
) -> list[dict[str, Any]]:
    """Convert messages to the form that chat templates expect.

    The content of a message is text, or if it has images a list of parts of type `text` and `image`; `images`
    collects the images. With None, images are refused.

    Raises:
        ApiError: 400 if there are no messages, or if a message has no content, has content that is not
            supported, or has a field that its role does not allow.
    """
    if not messages:
        raise invalid("messages must hold at least one message", "messages")
    return [template_message(message, f"messages[{index}]", images) for index, message in enumerate(messages)]


def template_message(message: Message, field: str, images: ImageCollector | None) -> dict[str, Any]:
    """Convert the message at path `field`; `content` is always present.

    Raises:
        ApiError: 400 if the message has no content, has content that is not supported, or has a field that
            its role does not allow.
    """
    if message.audio is not None:
        raise unsupported_field(f"{field}.audio")
    calls = list(message.tool_calls or ())
    if message.function_call is not None:
        calls.append(ToolCall(message.function_call))
    if calls and message.role != "assistant":
        raise invalid(f"{field}.tool_calls: only an assistant message may have them", f"{field}.tool_calls")
    if message.tool_call_id is not None and message.role != "tool":
        raise invalid(f"{field}.tool_call_id: only a tool message may have one", f"{field}.tool_call_id")
    content = message_content(message, field, images)
    reasoning = {name: text for name in REASONING_FIELDS if (text := getattr(message, name)) is not None}
    if content is None and not calls and not reasoning:
        raise invalid(f"{field}.content is required", f"{field}.content", "missing_field")
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    entry: dict[str, Any] = {"role": role, "content": content or ""}
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            entry[name] = getattr(message, name)
    entry |= reasoning
    if calls:
        entry["tool_calls"] = [template_call(call) for call in calls]
    return entry


def message_content(
    message: Message, field: str, images: ImageCollector | None
) -> str | list[dict[str, Any]] | None:
    """Return the content of the message at path `field`; None if it has none.

    Raises:
        ApiError: 400 for a part that is neither text nor an allowed image.
    """
    content = message.content
    if isinstance(content, list):
        parts: list[dict[str, Any]] = []
        for index, part in enumerate(content):
            path = f"{field}.content[{index}]"
            if part.type == "image_url" or part.image_url is not None:
                add_image(part, path, message.role, images)
                parts.append({"type": "image"})
            else:
                parts.append({"type": "text", "text": part_text(part, path)})
        if any(part["type"] == "image" for part in parts):
            return parts
        return "\n".join(part["text"] for part in parts)
    if not content and message.refusal:
        return message.refusal
    return content


def add_image(part: Part, path: str, role: str, images: ImageCollector | None) -> None:
    """Add the image of the part at `path`, in a message of `role`, to `images`.

    Raises:
        ApiError: 400 if the part or the image is invalid, or images are not allowed there.
    """
    source = part.source if isinstance(part, ImagePart) else image_source(part, path)
    if images is None:
        raise ImagePartError(source.path, "this endpoint reads text only, no images", "unsupported_content")
    if role not in IMAGE_ROLES:
        reason = f"a message of the role {role} must not have images, only those of user and tool"
        raise ImagePartError(source.path, reason, "unsupported_content")
    images.add(source)


def image_source(part: Part, path: str) -> ImageSource:
    """Return the source of the image of the part at `path`.

    Raises:
        ApiError: 400 if the part has no image, or has text, too.
    """
    if part.type != "image_url":
        raise invalid(f"{path}.image_url needs the type image_url", f"{path}.type", "unsupported_content")
    for name in ("text", "refusal", *UNSUPPORTED_PARTS):
        if getattr(part, name) is not None:
            raise invalid(f"{path}.{name} is not allowed beside an image", f"{path}.{name}")
    image = part.image_url
    if image is None:
        raise invalid(f"{path}.image_url is required", f"{path}.image_url", "missing_field")
    return (
        ImageSource(path, image)
        if isinstance(image, str)
        else ImageSource(path, image.url, detail=image.detail)
    )


def part_text(part: Part, field: str) -> str:
    """Return the text of the content part at path `field`.

    Raises:
        ApiError: 400 if the part is not text, or its text is missing.
    """
    for name in UNSUPPORTED_PARTS:
        if part.type == name or getattr(part, name) is not None:
            raise invalid(
                f"{field}: {name} parts are not supported, only text and images",
                f"{field}.type" if part.type == name else f"{field}.{name}",
                "unsupported_content",
            )
    if part.type not in ("text", "refusal"):
        raise invalid(
            f"{field}.type is {part.type[:80]!r}; only parts of type text and image_url are supported",
            f"{field}.type",
            "unsupported_content",
        )
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise invalid(f"{field}.{part.type} is required", f"{field}.{part.type}", "missing_field")
    return text


def template_call(call: ToolCall) -> dict[str, Any]:
    """Convert a tool call to a dictionary; the chat template decides on the form of the arguments."""
    entry: dict[str, Any] = {
        "type": "function",
        "function": {"name": call.function.name, "arguments": call.function.arguments},
    }
    return entry if call.id is None else {"id": call.id, **entry}
