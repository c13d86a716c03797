# SPDX-License-Identifier: Apache-2.0
"""Response bodies and stream events of chat and text completions, and response bodies of GET /v1/models."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from mizzen.gateway.requests.usage import TokenUsage


class PromptTokensDetails(msgspec.Struct):
    """Number of prompt tokens that came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Number of output tokens that are reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def usage_body(usage: TokenUsage) -> Usage:
    """Convert token counts to OpenAI's JSON shape."""
    body = Usage(
        usage.prompt_tokens,
        usage.output_tokens,
        usage.prompt_tokens + usage.output_tokens,
        PromptTokensDetails(usage.cached_tokens),
    )
    if usage.reasoning_tokens:
        body.completion_tokens_details = CompletionTokensDetails(usage.reasoning_tokens)
    return body


class InputUsage(msgspec.Struct):
    """Token counts of a request without output tokens, such as one for embeddings."""

    prompt_tokens: int
    total_tokens: int


class TopLogprob(msgspec.Struct):
    """One of the most probable tokens at a position, in the shape of chat completions."""

    token: str
    logprob: float
    bytes: Annotated[
        list[int], Meta(description="UTF-8 bytes, even if the token is only part of a character.")
    ]


class TokenLogprob(msgspec.Struct):
    """Output token with its log probability, in the shape of chat completions."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of a choice's tokens, in the shape of chat completions."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """Log probabilities of a choice's tokens: parallel lists with one entry per token."""

    text_offset: Annotated[list[int], Meta(description="Position of each token's text, in characters.")]
    token_logprobs: Annotated[
        list[float | None], Meta(description="null for the first token of a prompt: no token precedes it.")
    ]
    tokens: list[str]
    top_logprobs: Annotated[
        list[dict[str, float] | None],
        Meta(description="Most probable tokens at each position, and in any case the token itself."),
    ]


class CalledFunctionDelta(msgspec.Struct, omit_defaults=True):
    """Next part of a called function: its name, or more text of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallChunk(msgspec.Struct, omit_defaults=True):
    """Next part of a tool call; only the first part has `id` and the function's `name`."""

    index: int
    function: CalledFunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    """Next part of a chat message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallChunk] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """Next part of a choice."""

    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class Chunk(msgspec.Struct):
    """Event of a chat stream."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET


class AnsweredFunction(msgspec.Struct):
    """Function called by the model, with its arguments."""

    name: str
    arguments: Annotated[str, Meta(description="JSON text as written by the model.")]


class AnsweredCall(msgspec.Struct):
    """Tool call in a response."""

    id: str
    function: AnsweredFunction
    type: str = "function"


class AnswerMessage(msgspec.Struct):
    """Message of a chat response."""

    content: Annotated[str | None, Meta(description="null if there are tool calls and no text.")]
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """Choice of a chat response."""

    message: AnswerMessage
    finish_reason: str
    index: int = 0
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct):
    """Response of POST /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextChoice(msgspec.Struct):
    """Choice of a text completion; in a stream event, the next part of it."""

    text: str
    finish_reason: str | None = None
    index: int = 0
    logprobs: TextLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct):
    """Response of POST /v1/completions, and the events of its stream."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class Model(msgspec.Struct):
    """A served model."""

    id: str
    created: int
    object: str = "model"
    owned_by: str = "mizzen"
    root: str | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET


class ModelList(msgspec.Struct):
    """Response of GET /v1/models."""

    data: list[Model]
    object: str = "list"
