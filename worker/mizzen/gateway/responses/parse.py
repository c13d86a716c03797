# SPDX-License-Identifier: Apache-2.0
"""Parse bodies of the Responses API by converting them to chat requests.

If a field of the chat request is invalid, the error names the corresponding field of the client's request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.fields.decoder import BodyDecoder
from mizzen.gateway.fields.ignored import collect_paths
from mizzen.gateway.fields.rules import REFUSED, UNUSED, Rules, advise, refuse, unused
from mizzen.gateway.images.limits import ImagePartError
from mizzen.gateway.openai.format_schemas import JsonSchema, ResponseFormat
from mizzen.gateway.openai.messages import Message
from mizzen.gateway.openai.schemas import ChatRequest
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.responses.input_items import NOT_STORED, ItemsParser, chat_messages
from mizzen.gateway.responses.schemas import CHAT_FIELDS, ResponsesRequest, TextOptions
from mizzen.gateway.responses.tools import ResponseTools, ToolsParser, chat_tool_choice
from mizzen.gateway.tools.tool_choice import check_depth
from mizzen.gateway.tools.tool_schemas import Function, Tool, ToolChoice

MAX_METADATA = 16
MAX_METADATA_NAME = 64
MAX_METADATA_TEXT = 512
SUPPORTED_INCLUDE = "reasoning.encrypted_content"
HOSTED_INCLUDES = frozenset({
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "web_search_call.action.sources", "web_search_call.results",
})  # fmt: skip
"""Values of `include` that concern only hosted tools and images."""
AS_IT_IS = "reasoning is returned as it is (leave it out)"
FORMAT_FIELDS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "json_schema", "regex", "ebnf", "grammar",
)  # fmt: skip
"""Fields of chat requests that constrain the answer."""
RULES: Rules = {
    "store": advise(False, reason=NOT_STORED),
    "previous_response_id": refuse(reason=NOT_STORED),
    "conversation": refuse(reason=NOT_STORED),
    "background": refuse(False),
    "service_tier": advise("auto", "default"),
    "truncation": advise("disabled"),
    "top_logprobs": refuse(0),
    "max_tool_calls": advise(),
    "prompt": REFUSED,
    "image": advise(),
    "access_programs": REFUSED,
    "context_management": advise([]),
    "moderation": REFUSED,
    "prompt_cache_options": advise(),
    "prompt_cache_retention": advise("in_memory"),
    "reasoning.summary": advise("auto", reason=AS_IT_IS),
    "reasoning.generate_summary": advise("auto", reason=AS_IT_IS),
    "text.verbosity": advise("medium"),
    "text.format.description": UNUSED,
    "stream_options.include_obfuscation": unused(False),
    "messages": refuse(reason="use input"),
    "max_tokens": refuse(reason="use max_output_tokens"),
    "max_completion_tokens": refuse(reason="use max_output_tokens"),
    "reasoning_effort": refuse(reason="use reasoning.effort"),
    "functions": refuse([], reason="use tools"),
    "n": refuse(1),
    "logprobs": refuse(False, reason="use chat completions for log probabilities"),
    **dict.fromkeys(FORMAT_FIELDS, refuse(reason="use text.format")),
}

RENAMED_FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}
"""Names of chat request fields, each with the field's name in the Responses API."""
_CHAT_FUNCTION = re.compile(r"tools\[(\d+)\]\.function", re.ASCII)


@dataclass(frozen=True, slots=True)
class ParsedResponsesRequest:
    """A decoded request, its tools, and the `GenerationRequest` that it was converted to."""

    request: ResponsesRequest
    tools: ResponseTools
    generation: GenerationRequest


class ResponsesParser:
    """Parser of Responses bodies, which converts them to chat requests."""

    def __init__(
        self,
        chat: Callable[[ChatRequest, tuple[str, ...]], GenerationRequest],
        *,
        strict_fields: bool = False,
    ) -> None:
        """Create a parser.

        Args:
            chat: Converts a chat request, and the paths of its ignored fields, to a `GenerationRequest`.
            strict_fields: True to reject unknown fields, fields that only advise, and hosted tools.
        """
        self._decoder = BodyDecoder(ResponsesRequest, RULES, strict=strict_fields)
        self._items = ItemsParser(strict_fields=strict_fields)
        self._tools = ToolsParser(strict_fields=strict_fields)
        self._chat = chat
        self._strict = strict_fields

    def parse(self, body: bytes) -> ParsedResponsesRequest:
        """Parse a request body.

        Raises:
            ApiError: 400 if a field is invalid or not supported; the error names it.
        """
        request, ignored = self._decoder.decode(body)
        include = check_include(request.include or (), strict=self._strict)
        check_request(request)
        tools = self._tools.parse(request.tools or ())
        items, in_items = self._items.parse(request.input)
        choice, left_out = chat_tool_choice(request.tool_choice, tools, strict_fields=self._strict)
        messages = chat_messages(items, request.instructions, tools)
        paths = collect_paths(ignored, include, tools.ignored, left_out, in_items)
        chat = chat_request(request, messages, list(tools.functions.values()), choice)
        try:
            generation = self._chat(chat, paths)
        except ApiError as error:
            rename_field(error, tools)
            raise
        return ParsedResponsesRequest(request, tools, replace(generation, include_usage=True))


def check_request(request: ResponsesRequest) -> None:
    """Check the fields that chat requests do not have.

    Raises:
        ApiError: 400 if a field has an invalid value; the error names it.
    """
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is allowed only when stream is true", "stream_options")
    check_metadata(request.metadata or {})


def check_include(values: Iterable[str], *, strict: bool) -> list[str]:
    """Check the values of `include`; return the paths of the ignored ones.

    Raises:
        ApiError: 400 if a value is not supported; with `strict`, this includes those of hosted tools.
    """
    ignored: list[str] = []
    for index, value in enumerate(values):
        if value == SUPPORTED_INCLUDE:
            continue
        if strict or value not in HOSTED_INCLUDES:
            field = f"include[{index}]"
            raise invalid(f"{field} is {value[:80]!r}; only {SUPPORTED_INCLUDE} is supported", field)
        ignored.append("include[]")
    return ignored


def check_metadata(metadata: dict[str, str]) -> None:
    """Check that metadata is within OpenAI's limits.

    Raises:
        ApiError: 400 if there are too many entries, or a key or value is too long.
    """
    if len(metadata) > MAX_METADATA:
        raise invalid(
            f"metadata holds {len(metadata)} entries; at most {MAX_METADATA} are allowed", "metadata"
        )
    for name, text in metadata.items():
        if len(name) > MAX_METADATA_NAME or len(text) > MAX_METADATA_TEXT:
            raise invalid(
                f"metadata: keys may have {MAX_METADATA_NAME} characters, values {MAX_METADATA_TEXT}",
                "metadata",
            )


def chat_request(
    request: ResponsesRequest,
    messages: list[Message],
    functions: list[Function],
    tool_choice: ToolChoice | None,
) -> ChatRequest:
    """Return the chat request that is equivalent to a Responses request.

    Raises:
        ApiError: 400 if the text format is invalid; the error names the field.
    """
    reasoning = request.reasoning
    return ChatRequest(
        **{name: getattr(request, name) for name in CHAT_FIELDS},
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        tools=[Tool("function", function) for function in functions] or None,
        tool_choice=tool_choice,
        response_format=chat_response_format(request.text),
        reasoning_effort=None if reasoning is None else reasoning.effort,
    )


def chat_response_format(options: TextOptions | None) -> ResponseFormat | None:
    """Convert the format in the text options to the form of chat requests; None if the format is plain text.

    Raises:
        ApiError: 400 if the schema or its name is missing, or the schema is nested too deeply.
    """
    text_format = options.format if options is not None else None
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return ResponseFormat("json_object")
    for name in ("name", "schema"):
        if getattr(text_format, name) is None:
            raise invalid(f"text.format.{name} is required", f"text.format.{name}", "missing_field")
    check_depth(text_format.schema, "text.format.schema")
    return ResponseFormat(
        "json_schema", JsonSchema(text_format.name or "", text_format.schema, text_format.strict)
    )


def rename_field(error: ApiError, tools: ResponseTools) -> None:
    """If an error names a chat field, name the corresponding field of the Responses API instead."""
    name = error.param
    if name is None or isinstance(error, ImagePartError):
        return
    if tool := _CHAT_FUNCTION.match(name):
        error.param = list(tools.functions)[int(tool[1])] + name[tool.end() :]
        error.message = error.message.replace(name, error.param, 1)
        return
    if name.startswith("messages["):  # several items may have become one message
        error.param, error.message = "input", error.message.replace(name, "input", 1)
        return
    if name not in RENAMED_FIELDS:
        return
    error.param = RENAMED_FIELDS[name]
    if error.message.startswith(name):
        error.message = error.param + error.message.removeprefix(name)
