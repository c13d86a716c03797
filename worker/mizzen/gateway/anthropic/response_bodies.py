# SPDX-License-Identifier: Apache-2.0
"""Response bodies of the Messages API, and the content blocks in them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta


class AnswerText(msgspec.Struct, tag_field="type", tag="text"):
    """Content block with text."""

    text: str
    citations: list[Any] | None = None


class AnswerThinking(msgspec.Struct, tag_field="type", tag="thinking"):
    """Content block with reasoning."""

    thinking: str
    signature: Annotated[str, Meta(description="Opaque, and not checked when it is sent back.")]


class AnswerToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    """Content block with a tool call."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]


ContentBlock = AnswerText | AnswerThinking | AnswerToolUse


class ThinkingTokens(msgspec.Struct):
    """Number of output tokens that are reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Token counts of a request; the prompt has `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: Annotated[int, Meta(description="Prompt tokens that were not in the prefix cache.")]
    output_tokens: int
    cache_read_input_tokens: Annotated[int, Meta(description="Prompt tokens from the prefix cache.")]
    output_tokens_details: ThinkingTokens
    cache_creation_input_tokens: int = 0


class MessageResponse(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """Response of POST /v1/messages; the first event of a stream also contains it, without content."""

    id: str
    role: str = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class CountTokensResponse(msgspec.Struct):
    """Response of POST /v1/messages/count_tokens."""

    input_tokens: int
