# SPDX-License-Identifier: Apache-2.0
"""Parse bodies of the Messages API by converting them to chat requests.

If a field of the chat request is invalid, the error names the corresponding field of the client's request.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mizzen.gateway.anthropic.conversation import ConversationParser
from mizzen.gateway.anthropic.schemas import CountTokensRequest, MessagesRequest
from mizzen.gateway.anthropic.tools import CustomToolParser, MessagesTools, convert_tool_choice
from mizzen.gateway.errors import ApiError
from mizzen.gateway.fields.decoder import BodyDecoder
from mizzen.gateway.fields.ignored import collect_paths
from mizzen.gateway.fields.rules import Rules, advise, refuse, unused
from mizzen.gateway.images.limits import ImagePartError
from mizzen.gateway.openai.format_schemas import JsonSchema, ResponseFormat
from mizzen.gateway.openai.schemas import ChatRequest
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.tools.tool_choice import check_depth

COUNT_RULES: Rules = {
    "thinking.budget_tokens": unused(),
    "thinking.display": advise("summarized"),
    "context_management": advise({}),
    "mcp_servers": refuse([], reason="the client must connect to MCP servers"),
    "speed": advise("standard"),
    "user_profile_id": advise(),
    "workspace_id": advise(),
}
RULES: Rules = {
    **COUNT_RULES,
    "container": refuse(reason="code is not run here"),
    "diagnostics": advise(),
    "inference_geo": advise(),
    "service_tier": advise("auto", "standard_only"),
    "max_completion_tokens": refuse(reason="use max_tokens"),
    "stop": refuse(reason="use stop_sequences"),
    "response_format": refuse(reason="use output_config.format"),
    "output_format": refuse(reason="use output_config.format"),
    "functions": refuse([], reason="use tools"),
    "n": refuse(1),
    "logprobs": refuse(False, reason="use chat completions for log probabilities"),
}
SAMPLING_FIELDS = ("max_tokens", "stream", "temperature", "top_p", "top_k")
"""Fields of requests with an answer that have the same meaning in chat requests."""
RENAMED_FIELDS = {
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "tool_choice.function.name": "tool_choice.name",
}
"""Names of chat request fields, each with the field's name in the Messages API."""
_CHAT_FUNCTION = re.compile(r"tools\[(\d+)\]\.function(\.parameters)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ParsedMessagesRequest:
    """A `GenerationRequest`, and the tools of the request that it was converted from."""

    generation: GenerationRequest
    tools: MessagesTools


class MessagesParser:
    """Parser of Messages bodies, which converts them to chat requests."""

    def __init__(
        self,
        chat: Callable[[ChatRequest, tuple[str, ...]], GenerationRequest],
        *,
        strict_fields: bool = False,
    ) -> None:
        """Create a parser.

        Args:
            chat: Converts a chat request, and the paths of its ignored fields, to a `GenerationRequest`.
            strict_fields: True to reject unknown fields, fields that only advise, and tools that Anthropic
                runs.
        """
        self._decoder = BodyDecoder(MessagesRequest, RULES, strict=strict_fields)
        self._count_decoder = BodyDecoder(CountTokensRequest, COUNT_RULES, strict=strict_fields)
        self._conversation = ConversationParser(strict_fields=strict_fields)
        self._tools = CustomToolParser(strict_fields=strict_fields)
        self._chat = chat

    def parse(self, body: bytes) -> ParsedMessagesRequest:
        """Parse the body of a request for an answer.

        Raises:
            ApiError: 400 if a field is invalid or not supported; the error names it.
        """
        request, ignored = self._decoder.decode(body)
        fields = {name: getattr(request, name) for name in SAMPLING_FIELDS}
        fields["stop"] = request.stop_sequences
        fields["user"] = None if request.metadata is None else request.metadata.user_id
        return self._convert(request, ignored, fields)

    def parse_count(self, body: bytes) -> ParsedMessagesRequest:
        """Parse the body of a request whose prompt tokens are to be counted.

        Raises:
            ApiError: 400 if a field is invalid or not supported; the error names it.
        """
        return self._convert(*self._count_decoder.decode(body), {})

    def _convert(
        self, request: CountTokensRequest, ignored: tuple[str, ...], fields: dict[str, Any]
    ) -> ParsedMessagesRequest:
        """Convert a request; `fields` are the fields of the chat request that only some requests have."""
        tools = self._tools.parse(request.tools or ())
        choice = request.tool_choice
        conversation = self._conversation.parse(request)
        chat = ChatRequest(
            **fields,
            model=request.model,
            messages=conversation.messages,
            tools=list(tools.tools) or None,
            tool_choice=convert_tool_choice(choice, tools),
            parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
            continue_final_message=conversation.continues,
            chat_template_kwargs=thinking_variables(request),
            response_format=chat_response_format(request),
            reasoning_effort=None if request.output_config is None else request.output_config.effort,
        )
        try:
            generation = self._chat(chat, collect_paths(ignored, tools.ignored, conversation.ignored))
        except ApiError as error:
            rename_field(error, tools)
            raise
        # Clients must set max_tokens, and often set more than the context holds; the context then ends the
        # answer.
        return ParsedMessagesRequest(replace(generation, include_usage=True, max_tokens_given=False), tools)


def thinking_variables(request: CountTokensRequest) -> dict[str, Any] | None:
    """Return the variables of the chat template that turn reasoning on or off; None for its default."""
    if request.thinking is None or request.thinking.type not in ("enabled", "disabled"):
        return None
    enabled = request.thinking.type == "enabled"
    return {"enable_thinking": enabled, "thinking": enabled}


def chat_response_format(request: CountTokensRequest) -> ResponseFormat | None:
    """Convert the format of the answer to the form of chat requests; None if the format is plain text.

    Raises:
        ApiError: 400 if the schema is nested too deeply.
    """
    output_format = None if request.output_config is None else request.output_config.format
    if output_format is None:
        return None
    check_depth(output_format.schema, "output_config.format.schema")
    return ResponseFormat("json_schema", JsonSchema("answer", output_format.schema))


def rename_field(error: ApiError, tools: MessagesTools) -> None:
    """If an error names a chat field, name the corresponding field of the Messages API instead."""
    name = error.param
    if name is None or isinstance(error, ImagePartError):
        return
    if tool := _CHAT_FUNCTION.match(name):
        schema = ".input_schema" if tool[2] else ""
        error.param = tools.paths[int(tool[1])] + schema + name[tool.end() :]
    elif name.startswith("messages["):  # several blocks and messages may have become one message
        error.param = "messages"
    else:
        error.param = RENAMED_FIELDS.get(name, name)
    error.message = error.message.replace(name, error.param, 1)
