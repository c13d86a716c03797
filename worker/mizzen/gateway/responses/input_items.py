# SPDX-License-Identifier: Apache-2.0
"""Convert the items of a request's `input` to chat messages.

`responses/parse.py` calls `chat_messages`; consecutive items of the assistant become one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw

from mizzen.gateway.errors import invalid
from mizzen.gateway.fields.ignored import MAX_PATHS
from mizzen.gateway.fields.rules import Rules, unused
from mizzen.gateway.fields.typed_objects import TypedObjects
from mizzen.gateway.images.limits import ImagePartError
from mizzen.gateway.images.request_images import ImageSource
from mizzen.gateway.openai.messages import ImagePart, Message, Part
from mizzen.gateway.responses.tools import CallName, ResponseTools
from mizzen.gateway.tools.tool_schemas import CalledFunction, ToolCall

MAX_ITEMS = 65_536
UNSUPPORTED_PARTS = ("input_file", "input_audio")
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
NOT_STORED = (
    "this gateway stores no responses (--response-store-seconds is 0): set `store: false` in your client or"
    " SDK, so that it sends the earlier items themselves in input"
)
"""Reason why fields and items that need stored responses are rejected."""


class InputContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """Part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    image_url: Any = None
    file_id: Any = None
    detail: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    input_audio: Any = None


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Item that holds a message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputContentPart]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """Item that holds a function call by the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    namespace: str | None = None
    status: str | None = None


class FunctionCallOutput(msgspec.Struct, forbid_unknown_fields=True):
    """Item that holds the output of a called function."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputContentPart]
    id: str | None = None
    status: str | None = None


class ReasoningText(msgspec.Struct, forbid_unknown_fields=True):
    """Text of a reasoning item, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True):
    """Item that holds the model's reasoning."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: str | None = None


ITEM_TYPES: dict[str, type[msgspec.Struct]] = {
    "message": InputMessage,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": ReasoningItem,
}


ITEM_RULES: dict[str, Rules] = {"reasoning": {"encrypted_content": unused("")}}


class ItemsParser:
    """Parser of the items of requests."""

    def __init__(self, *, strict_fields: bool) -> None:
        """Create a parser; with `strict_fields`, it rejects unknown fields that are not null."""
        self._decoders = TypedObjects(ITEM_TYPES, ITEM_RULES, strict=strict_fields, default="message")

    def parse(self, request_input: str | Sequence[Raw]) -> tuple[str | list[msgspec.Struct], tuple[str, ...]]:
        """Return the parsed items of a request's input, or its text, and the paths of ignored fields.

        Raises:
            ApiError: 400 if an item is invalid or its type is not supported, or if there are no items or too
                many; the error names the field.
        """
        if isinstance(request_input, str):
            return request_input, ()
        if not request_input:
            raise invalid("input must hold at least one item", "input")
        if len(request_input) > MAX_ITEMS:
            raise invalid(f"input holds {len(request_input)} items; at most {MAX_ITEMS} are allowed", "input")
        items: list[msgspec.Struct] = []
        ignored: dict[str, None] = {}
        for index, raw in enumerate(request_input):
            item, names = self._parse_item(raw, f"input[{index}]")
            items.append(item)
            if names and len(ignored) <= MAX_PATHS:
                ignored.update(dict.fromkeys(f"input[].{name}" for name in names))
        return items, tuple(ignored)

    def _parse_item(self, raw: Raw, field: str) -> tuple[msgspec.Struct, tuple[str, ...]]:
        """Return the item at path `field`, and the paths of its ignored fields within it."""
        kind = self._decoders.kind_of(raw, field)
        if not isinstance(kind, str) or kind not in ITEM_TYPES:
            reason = NOT_STORED if kind == "item_reference" else f"use {', '.join(ITEM_TYPES)}"
            raise invalid(
                f"{field}.type is {str(kind)[:80]!r}, which is not supported: {reason}",
                f"{field}.type",
                "unsupported_item",
            )
        return self._decoders.decode(raw, kind, field)


def chat_messages(
    request_input: str | Sequence[msgspec.Struct], instructions: str | None, tools: ResponseTools
) -> list[Message]:
    """Convert a request's text or items to chat messages.

    Consecutive reasoning, text and calls of the assistant become one message, because chat templates expect
    that. The instructions and leading system messages also become one message.

    Raises:
        ApiError: 400 if an item has content that is not text, or is the output of a call that does not
            precede it; the error names the field.
    """
    builder = MessageBuilder(instructions)
    if isinstance(request_input, str):
        builder.add_message("user", request_input)
        return builder.build()
    for index, item in enumerate(request_input):
        add_item(builder, item, f"input[{index}]", tools)
    return builder.build()


class MessageBuilder:
    """Builder of chat messages from items, which are added in order."""

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[Message] = []
        self.call_ids: set[str] = set()
        """Ids of all calls added so far."""
        self._system_texts: list[str] = []
        """Texts of the leading system messages; `build` joins them to form the first message."""
        if instructions is not None:
            self.add_message("system", instructions)

    def add_message(self, role: str, content: str | list[Part]) -> None:
        """Add a message, or join it with the system message or the reasoning that it directly follows."""
        last = self.messages[-1] if self.messages else None
        if (
            role == "system"
            and isinstance(content, str)
            and len(self.messages) == len(self._system_texts[:1])
        ):
            self.messages = self.messages or [Message("system")]
            self._system_texts.append(content)
        elif role == "assistant" and last is not None and is_reasoning_only(last):
            last.content = content
        else:
            self.messages.append(Message(role, content))  # type: ignore[arg-type]

    def add_reasoning(self, text: str) -> None:
        """Start an assistant message that begins with reasoning."""
        self.messages.append(Message("assistant", reasoning_content=text))

    def add_call(self, call: FunctionCall, name: str) -> None:
        """Add a call of the function that the model knows by a name.

        The call becomes part of the last message if that is the assistant's, otherwise of a new message.
        """
        self.call_ids.add(call.call_id)
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant":
            last = Message("assistant")
            self.messages.append(last)
        tool_call = ToolCall(CalledFunction(name, call.arguments), call.call_id)
        if last.tool_calls is None:
            last.tool_calls = []
        last.tool_calls.append(tool_call)

    def add_call_output(self, call_id: str, content: str | list[Part]) -> None:
        """Add the output of a call as a tool message."""
        self.messages.append(Message("tool", content, tool_call_id=call_id))

    def build(self) -> list[Message]:
        """Return all messages; no more may be added."""
        if self._system_texts:
            self.messages[0].content = "\n\n".join(self._system_texts)
        return self.messages


def is_reasoning_only(message: Message) -> bool:
    """Return whether a message is an assistant message that holds only reasoning so far."""
    return message.role == "assistant" and message.content is None and not message.tool_calls


def add_item(builder: MessageBuilder, item: msgspec.Struct, field: str, tools: ResponseTools) -> None:
    """Add the item at path `field` to the conversation; `tools` are the tools of the request.

    Raises:
        ApiError: 400 if the item has content that is not text, or is the output of a call that does not
            precede it.
    """
    match item:
        case InputMessage(role, content):
            parts = chat_content(content, f"{field}.content")
            builder.add_message("system" if role == "developer" else role, parts)
        case FunctionCall():
            builder.add_call(item, tools.model_name(CallName(item.name, item.namespace)))
        case FunctionCallOutput(_, call_id, output):
            if call_id not in builder.call_ids:
                raise invalid(
                    f"{field}.call_id: no function_call {call_id[:80]!r} comes before it: send it, too",
                    f"{field}.call_id",
                )
            builder.add_call_output(call_id, chat_content(output, f"{field}.output"))
        case ReasoningItem():
            texts = item.content or item.summary
            if texts:
                builder.add_reasoning("\n".join(part.text for part in texts))
        case _:
            raise TypeError(f"{type(item)} is not an item type")


def chat_content(content: str | list[InputContentPart], field: str) -> str | list[Part]:
    """Return the content at path `field` as that of a chat message; texts without images are joined.

    Raises:
        ApiError: 400 for a part that is neither text nor an image.
    """
    if isinstance(content, str):
        return content
    paths = [f"{field}[{index}]" for index in range(len(content))]
    if not any(part.type == "input_image" for part in content):
        return "\n".join(map(part_text, content, paths))
    return [
        image_part(part, path) if part.type == "input_image" else Part("text", part_text(part, path))
        for part, path in zip(content, paths, strict=True)
    ]


def image_part(part: InputContentPart, field: str) -> ImagePart:
    """Return the part of a chat message for the image at path `field`.

    Raises:
        ImagePartError: 400 if the image is not given as a URL.
    """
    if part.file_id is not None:
        reason = "file_id is not supported, because no files are stored: send image_url with a data: URL"
        raise ImagePartError(field, reason, "unsupported_content")
    if not isinstance(part.image_url, str):
        raise ImagePartError(field, "image_url must be a string", "missing_field")
    if not isinstance(part.detail, str | None):
        raise ImagePartError(field, "detail must be a string", "invalid_type")
    return ImagePart(type="image_url", source=ImageSource(field, part.image_url, detail=part.detail))


def part_text(part: InputContentPart, field: str) -> str:
    """Return the text of the content part at path `field`.

    Raises:
        ApiError: 400 if the part is not text, or its text is missing.
    """
    if part.type not in TEXT_PARTS:
        unreadable = part.type in UNSUPPORTED_PARTS
        extra = "the model reads text and images only" if unreadable else "only text and images are supported"
        raise invalid(f"{field}.type is {part.type[:80]!r}; {extra}", f"{field}.type", "unsupported_content")
    name = "refusal" if part.type == "refusal" else "text"
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise invalid(f"{field}.{name} is required", f"{field}.{name}", "missing_field")
    return text
