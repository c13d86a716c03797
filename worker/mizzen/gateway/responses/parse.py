"""Parse bodies of the Responses API by converting them to chat requests.

If a field of the chat request is invalid, the error names the corresponding field of the client's request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.openai.format_schemas import JsonSchema, ResponseFormat
from mizzen.gateway.openai.schemas import ChatRequest
from mizzen.gateway.requests.decode_body import decode_body, reject_unsupported
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.responses.input_items import NOT_STORED, chat_messages
from mizzen.gateway.responses.schemas import (
    CHAT_FIELDS,
    AllowedResponseTools,
    NamedResponseTool,
    ResponsesRequest,
    ResponseTool,
    ResponseToolChoice,
    TextOptions,
)
from mizzen.gateway.tools.tool_choice import check_depth, check_functions, find_function
from mizzen.gateway.tools.tool_schemas import (
    AllowedSet,
    AllowedTools,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
)

MAX_METADATA = 16
MAX_METADATA_NAME = 64
MAX_METADATA_TEXT = 512
SUPPORTED_INCLUDE = "reasoning.encrypted_content"
NOOP_VALUES: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "max_tool_calls": (),
    "prompt": (),
    "image": (),
    "access_programs": (),
    "context_management": ([],),
    "moderation": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
}
"""Unsupported fields, each with the values (besides null) that are accepted because they change nothing."""
STORAGE_FIELDS = {"store": NOT_STORED, "previous_response_id": NOT_STORED, "conversation": NOT_STORED}

RENAMED_FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}
"""Names of chat request fields, each with the field's name in the Responses API."""


@dataclass(frozen=True, slots=True)
class ParsedResponsesRequest:
    """A decoded request, and the `GenerationRequest` that it was converted to."""

    request: ResponsesRequest
    generation: GenerationRequest


class ToolsOnly(msgspec.Struct):
    """A request body; only the list `tools` is decoded, and its elements may be any JSON values."""

    tools: list[Any]


class ResponsesParser:
    """Parser of Responses bodies, which converts them to chat requests."""

    def __init__(self, chat: Callable[[ChatRequest], GenerationRequest]) -> None:
        """Create a parser; `chat` converts a chat request to a `GenerationRequest`."""
        self._decoder = msgspec.json.Decoder(ResponsesRequest)
        self._chat = chat

    def parse(self, body: bytes) -> ParsedResponsesRequest:
        """Parse a request body.

        Raises:
            ApiError: 400 if a field is invalid or not supported; the error names it.
        """
        request = self._decode(body)
        check_request(request)
        chat = chat_request(request)
        try:
            generation = self._chat(chat)
        except ApiError as error:
            rename_field(error)
            raise
        return ParsedResponsesRequest(request, replace(generation, include_usage=True))

    def _decode(self, body: bytes) -> ResponsesRequest:
        try:
            return decode_body(self._decoder, body)
        except ApiError as error:
            if error.param is not None and error.param.startswith("tools["):
                reject_unsupported_tools(body)
            raise


def check_request(request: ResponsesRequest) -> None:
    """Check the fields that chat requests do not have.

    Raises:
        ApiError: 400 if a field has an invalid or unsupported value; the error names it.
    """
    for name, reason in STORAGE_FIELDS.items():
        if not (getattr(request, name) is None or (name == "store" and request.store is False)):
            raise invalid(f"{name} is not supported: {reason}", name, "unsupported_parameter")
    reject_unsupported(request, NOOP_VALUES)
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is allowed only when stream is true", "stream_options")
    for index, name in enumerate(request.include or ()):
        if name != SUPPORTED_INCLUDE:
            field = f"include[{index}]"
            raise invalid(f"{field} is {name[:80]!r}; only {SUPPORTED_INCLUDE} is supported", field)
    for name in ("summary", "generate_summary"):
        if request.reasoning is not None and getattr(request.reasoning, name) not in (None, "auto"):
            field = f"reasoning.{name}"
            raise invalid(
                f"{field}: summaries are not supported, reasoning is returned as it is (leave it out)",
                field,
                "unsupported_parameter",
            )
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise invalid(
            "text.verbosity is not supported (leave it out)", "text.verbosity", "unsupported_parameter"
        )
    check_metadata(request.metadata or {})


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


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """Return the chat request that is equivalent to a Responses request.

    Raises:
        ApiError: 400 if the input, a tool, the tool choice or the text format is invalid; the error names the
            field.
    """
    functions = [tool_function(tool, index) for index, tool in enumerate(request.tools or ())]
    check_functions(functions, "tools[{}]")
    reasoning = request.reasoning
    return ChatRequest(
        **{name: getattr(request, name) for name in CHAT_FIELDS},
        messages=chat_messages(request.input, request.instructions),
        max_completion_tokens=request.max_output_tokens,
        tools=[Tool("function", function) for function in functions] or None,
        tool_choice=chat_tool_choice(request.tool_choice, tuple(functions)),
        response_format=chat_response_format(request.text),
        reasoning_effort=None if reasoning is None else reasoning.effort,
    )


def tool_function(tool: ResponseTool, index: int) -> Function:
    """Return the function of the tool at `index`.

    Raises:
        ApiError: 400 if the type of the tool is not `function`.
    """
    if tool.type != "function":
        raise unsupported_tool_error(tool.type, index)
    return Function(tool.name, tool.description, tool.parameters, tool.strict)


def reject_unsupported_tools(body: bytes) -> None:
    """Reject the first tool of an unsupported type; do nothing if all types are supported.

    This is called after decoding has failed at a tool. A tool of an unsupported type has unknown fields, so
    the type may be the cause.

    Raises:
        ApiError: 400 if a tool has an unsupported type; the error names the tool and its type.
    """
    try:
        tools = msgspec.json.decode(body, type=ToolsOnly).tools
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise unsupported_tool_error(kind, index)


def unsupported_tool_error(kind: str, index: int) -> ApiError:
    """Return a 400 error for the tool at `index`, whose type is not supported."""
    field = f"tools[{index}].type"
    return invalid(
        f"{field} is {kind[:80]!r}; only function tools, which the client runs, are supported",
        field,
        "unsupported_tool",
    )


def chat_tool_choice(choice: ResponseToolChoice | None, functions: tuple[Function, ...]) -> ToolChoice | None:
    """Convert a tool choice to the form of chat requests.

    Raises:
        ApiError: 400 if the choice names an unknown tool, or allows no tools.
    """
    if isinstance(choice, NamedResponseTool):
        if functions:
            find_function(functions, choice.name, "tool_choice.name")
        return NamedTool(NamedFunction(choice.name))
    if isinstance(choice, AllowedResponseTools):
        if not choice.tools:
            raise invalid("tool_choice.tools is empty", "tool_choice.tools")
        if functions:
            for index, tool in enumerate(choice.tools):
                find_function(functions, tool.name, f"tool_choice.tools[{index}].name")
        tools = [NamedTool(NamedFunction(tool.name)) for tool in choice.tools]
        return AllowedTools(AllowedSet(choice.mode, tools))
    return choice


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


def rename_field(error: ApiError) -> None:
    """If an error names a chat field, name the corresponding field of the Responses API instead."""
    name = error.param
    if name is None:
        return
    if name.startswith("tools["):
        error.param = name.replace(".function.", ".", 1)
        error.message = error.message.replace(name, error.param, 1)
        return
    if name.startswith("messages["):  # several items may have become one message
        error.param, error.message = "input", error.message.replace(name, "input: a call's arguments", 1)
        return
    if name not in RENAMED_FIELDS:
        return
    error.param = RENAMED_FIELDS[name]
    if error.message.startswith(name):
        error.message = error.param + error.message.removeprefix(name)
