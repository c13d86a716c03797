# SPDX-License-Identifier: Apache-2.0
"""Response body of the Responses API, and the output items in it."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text part of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningPart(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Text part of reasoning."""

    text: str


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """Output item that holds a message of the model."""

    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """Output item that holds a function call by the model."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """Output item that holds the model's reasoning."""

    id: str
    status: str
    content: list[ReasoningPart]
    summary: list[Any] = []


OutputItem = OutputMessage | OutputCall | OutputReasoning


class InputTokensDetails(msgspec.Struct):
    """Number of prompt tokens that came from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """Number of output tokens that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Token counts of a request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Error of a failed response."""

    code: str
    message: str


class Incomplete(msgspec.Struct):
    """Reason why a response is incomplete."""

    reason: str


class ResponsesResponse(msgspec.Struct, kw_only=True):
    """Response of POST /v1/responses; the first and last events of a stream also contain it."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int = 0
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(msgspec.Struct):
    """Response of DELETE /v1/responses/{id}."""

    id: str
    object: str = "response"
    deleted: bool = True
