# SPDX-License-Identifier: Apache-2.0
"""Convert the messages of a Messages request, which consist of content blocks, to chat messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from mizzen.gateway.anthropic.schemas import (
    CountTokensRequest,
    ImageBlock,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    TurnMessage,
)
from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.fields.ignored import MAX_PATHS
from mizzen.gateway.fields.typed_objects import TypedObjects
from mizzen.gateway.images.limits import ImagePartError
from mizzen.gateway.images.request_images import ImageSource
from mizzen.gateway.openai.messages import ImagePart, Message, Part
from mizzen.gateway.tools.tool_schemas import CalledFunction, ToolCall

BLOCKS: dict[str, type[msgspec.Struct]] = {
    "text": TextBlock,
    "image": ImageBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}
ALLOWED_BLOCKS = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Types of the blocks that a message of each role may have."""
TEXT_ONLY, RESULT_BLOCKS = ("text",), ("text", "image")
UNREADABLE_BLOCKS = ("document", "search_result", "container_upload", "audio", "video", "file")
ERROR_PREFIX = "Error: "


@dataclass(frozen=True, slots=True)
class ParsedConversation:
    """Conversation of a request in the form of chat requests."""

    messages: list[Message]
    continues: bool
    """True if the answer continues the text of the last message, which is the assistant's."""
    ignored: tuple[str, ...]
    """Paths of ignored fields in content blocks."""


class ConversationParser:
    """Parser of the conversations of requests."""

    def __init__(self, *, strict_fields: bool) -> None:
        """Create a parser; with `strict_fields`, it rejects unknown fields that are not null."""
        self._decoders = TypedObjects(BLOCKS, strict=strict_fields)

    def parse(self, request: CountTokensRequest) -> ParsedConversation:
        """Return the conversation of a request.

        Raises:
            ApiError: 400 if there are no messages, a block is invalid or not supported, a result has no call
                before it, or the last message is the assistant's and has no text; the error names the field.
        """
        if not request.messages:
            raise invalid("messages must hold at least one message", "messages")
        builder = ConversationBuilder(BlockDecoder(self._decoders))
        if request.system is not None:
            builder.add_system(request.system)
        for index, message in enumerate(request.messages):
            builder.add(message, f"messages[{index}]")
        last = builder.messages[-1]
        if last.role == "assistant":
            check_continuation(last, f"messages[{len(request.messages) - 1}]")
        return ParsedConversation(builder.messages, last.role == "assistant", tuple(builder.blocks.ignored))


class BlockDecoder:
    """Decoder of one request's content blocks, which collects the paths of ignored fields."""

    def __init__(self, decoders: TypedObjects) -> None:
        self._decoders = decoders
        self.ignored: dict[str, None] = {}
        """Paths of ignored fields, in order."""

    def decode(
        self, content: str | Sequence[Raw], path: str, allowed: tuple[str, ...]
    ) -> Iterable[tuple[str, msgspec.Struct]]:
        """Yield the path of each block of the content at `path`, and the block; `allowed` lists valid types.

        Raises:
            ApiError: 400 if a block is invalid or has another type; the error names the field.
        """
        if isinstance(content, str):
            yield path, TextBlock(type="text", text=content)
            return
        for index, raw in enumerate(content):
            block_path = f"{path}[{index}]"
            kind = self._decoders.kind_of(raw, block_path)
            if kind not in allowed:
                raise unsupported_block(kind, block_path, allowed)
            block, names = self._decoders.decode(raw, kind, block_path)
            if names and len(self.ignored) <= MAX_PATHS:
                self.ignored.update(dict.fromkeys(f"messages[].content[].{name}" for name in names))
            yield block_path, block

    def text(self, content: str | Sequence[Raw] | None, path: str) -> str:
        """Return the content at `path` as text; text blocks are joined by line breaks.

        Raises:
            ApiError: 400 for a block that is not text.
        """
        blocks = self.decode(content or "", path, TEXT_ONLY)
        return "\n".join(block.text for _, block in blocks if isinstance(block, TextBlock))

    def parts(self, content: str | Sequence[Raw] | None, path: str) -> str | list[Part]:
        """Return the content at path as the content of a chat message: text, or parts if it has images.

        Raises:
            ApiError: 400 for a block that is neither text nor an image.
        """
        blocks = self.decode(content or "", path, RESULT_BLOCKS)
        return join_parts(
            [
                image_part(block, block_path) if isinstance(block, ImageBlock) else Part("text", block.text)
                for block_path, block in blocks
                if isinstance(block, TextBlock | ImageBlock)
            ]
        )


def image_part(block: ImageBlock, path: str) -> ImagePart:
    """Return the part of a chat message for the image block at `path`.

    Raises:
        ImagePartError: 400 if the source lacks its data.
    """
    given = block.source
    if given.type == "base64" and given.data is not None:
        source = ImageSource(path, base64=given.data)
    elif given.type == "url" and given.url is not None:
        source = ImageSource(path, given.url)
    else:
        name = "data" if given.type == "base64" else "url"
        raise ImagePartError(path, f"source.{name} is required", "missing_field")
    return ImagePart(type="image_url", source=source)


def join_parts(parts: Sequence[Part]) -> str | list[Part]:
    """Return parts as the content of a chat message: texts without images are joined by line breaks."""
    if any(isinstance(part, ImagePart) for part in parts):
        return list(parts)
    return "\n".join(part.text or "" for part in parts)


def unsupported_block(kind: object, path: str, allowed: tuple[str, ...]) -> ApiError:
    """Return the 400 error for a block whose type is not one of the `allowed` ones."""
    if not isinstance(kind, str):
        return invalid(f"{path}.type is required, and must be a string", f"{path}.type", "missing_field")
    reason = (
        "the model reads text and images only" if kind in UNREADABLE_BLOCKS else f"use {', '.join(allowed)}"
    )
    text = f"{path}.type is {kind[:80]!r}, which is not supported here: {reason}"
    return invalid(text, f"{path}.type", "unsupported_content")


def check_continuation(message: Message, path: str) -> None:
    """Check that an answer can continue the assistant's message at `path`.

    Raises:
        ApiError: 400 if it has calls, whose results must follow, or no text.
    """
    if message.tool_calls:
        raise invalid(f"{path}: tool_result blocks must follow its tool_use blocks", path)
    if not isinstance(message.content, str) or not message.content.strip():
        raise invalid(f"{path}: the last message is the assistant's, but has no text to continue", path)


class ConversationBuilder:
    """Builder of chat messages; consecutive messages of one role become one, as templates expect."""

    def __init__(self, blocks: BlockDecoder) -> None:
        self.messages: list[Message] = []
        self.blocks = blocks
        self._call_ids: set[str] = set()
        """Ids of all calls added so far."""

    def add_system(self, system: str | Sequence[Raw]) -> None:
        """Add the system prompt.

        Raises:
            ApiError: 400 for a block that is not text.
        """
        self._append(Message("system", self.blocks.text(system, "system")))

    def add(self, message: TurnMessage, path: str) -> None:
        """Add the message at `path`.

        Raises:
            ApiError: 400 if a block is invalid or not supported, or a result belongs to no call.
        """
        content = self.blocks.decode(message.content, f"{path}.content", ALLOWED_BLOCKS[message.role])
        if message.role == "assistant":
            self._add_assistant(content)
        else:
            self._add_text_and_results(message.role, content)

    def _add_assistant(self, content: Iterable[tuple[str, msgspec.Struct]]) -> None:
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        for _, block in content:
            match block:
                case TextBlock(text=text):
                    texts.append(text)
                case ThinkingBlock(thinking=thinking):
                    reasoning.append(thinking)
                case ToolUseBlock():
                    self._call_ids.add(block.id)
                    calls.append(ToolCall(CalledFunction(block.name, block.input), block.id))
                case _:
                    pass  # redacted reasoning, which the model cannot read
        message = Message("assistant", "\n".join(texts), tool_calls=calls or None)
        message.reasoning_content = "\n".join(reasoning) or None
        self._append(message)

    def _add_text_and_results(self, role: str, content: Iterable[tuple[str, msgspec.Struct]]) -> None:
        parts: list[Part] = []
        has_results = False
        for path, block in content:
            match block:
                case TextBlock(text=text):
                    parts.append(Part("text", text))
                case ImageBlock():
                    parts.append(image_part(block, path))
                case ToolResultBlock():
                    if parts:
                        self._append(Message(role, join_parts(parts)))  # type: ignore[arg-type]
                        parts = []
                    self.messages.append(self._tool_message(block, path))
                    has_results = True
                case _:
                    raise TypeError(f"{type(block)} is not a block of this role")
        if parts or not has_results:
            self._append(Message(role, join_parts(parts)))  # type: ignore[arg-type]

    def _tool_message(self, block: ToolResultBlock, path: str) -> Message:
        if block.tool_use_id not in self._call_ids:
            raise invalid(
                f"{path}.tool_use_id: no tool_use block {block.tool_use_id[:80]!r} precedes it",
                f"{path}.tool_use_id",
            )
        content = self.blocks.parts(block.content, f"{path}.content")
        text = content if isinstance(content, str) else content[0].text or ""
        if block.is_error and not text.lower().startswith("error"):
            error = Part("text", ERROR_PREFIX.rstrip())
            content = ERROR_PREFIX + content if isinstance(content, str) else [error, *content]
        return Message("tool", content, tool_call_id=block.tool_use_id)

    def _append(self, message: Message) -> None:
        """Add a message, or join it with the last one if that has the same role."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != message.role:
            self.messages.append(message)
            return
        last.content = join_contents(last.content, message.content)
        last.reasoning_content = join_texts(last.reasoning_content, message.reasoning_content) or None
        last.tool_calls = [*(last.tool_calls or ()), *(message.tool_calls or ())] or None


def join_texts(*texts: object) -> str:
    """Join texts by line breaks; values that are not texts, and empty texts, are left out."""
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def join_contents(first: str | list[Part] | None, second: str | list[Part] | None) -> str | list[Part]:
    """Join the contents of two messages: texts by line breaks, others as parts."""
    if not isinstance(first, list) and not isinstance(second, list):
        return join_texts(first, second)
    return [
        part
        for content in (first, second)
        for part in (content if isinstance(content, list) else [Part("text", content)] if content else ())
    ]
