"""From the body of a response request to what is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.openai.decode_body import decode, refuse_unserved
from mizzen.gateway.openai.schemas import ChatRequest
from mizzen.gateway.openai.structured_output import JsonSchema, ResponseFormat
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.responses.input_items import conversation
from mizzen.gateway.responses.schemas import (
    CHAT_FIELDS,
    AllowedResponseTools,
    NamedResponseTool,
    ResponsesRequest,
    ResponseTool,
    ResponseToolChoice,
    TextOptions,
)
from mizzen.gateway.tools.tool_choice import check_depth, check_functions, known
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
INCLUDABLE = "reasoning.encrypted_content"
HARMLESS: dict[str, tuple[Any, ...]] = {
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
"""Fields that are not served: values (besides null) that ask for nothing."""
STORED = {
    "store": "nothing is stored here: leave it out or send false, and send earlier items in input",
    "previous_response_id": "nothing is stored here: send the earlier items in input",
    "conversation": "nothing is stored here: send the earlier items in input",
}

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}
"""Fields of a chat request, and what they are called in a response request."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and what it means."""

    request: ResponsesRequest
    generation: GenerationRequest


class ToolsAlone(msgspec.Struct):
    """A body's tools as they came."""

    tools: list[Any]


class ResponsesParser:
    """Decodes bodies; the rest of the way is that of a chat."""

    def __init__(self, chat: Callable[[ChatRequest], GenerationRequest]) -> None:
        self._decoder = msgspec.json.Decoder(ResponsesRequest)
        self._chat = chat

    def read(self, body: bytes) -> Asked:
        """Return what a body asks for.

        Raises:
            ApiError: 400, which names the field.
        """
        request = self._decoded(body)
        check(request)
        chat = chat_request(request)
        try:
            generation = self._chat(chat)
        except ApiError as error:
            rename(error)
            raise
        return Asked(request, replace(generation, include_usage=True))

    def _decoded(self, body: bytes) -> ResponsesRequest:
        try:
            return decode(self._decoder, body)
        except ApiError as error:
            if error.param is not None and error.param.startswith("tools["):
                refuse_tools(body)
            raise


def check(request: ResponsesRequest) -> None:
    """Raise for what a request may not ask for.

    Raises:
        ApiError: 400, which names the field.
    """
    for name, reason in STORED.items():
        if not (getattr(request, name) is None or (name == "store" and request.store is False)):
            raise invalid(f"{name} is not served: {reason}", name, "unsupported_parameter")
    refuse_unserved(request, HARMLESS)
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is allowed only when stream is true", "stream_options")
    for index, name in enumerate(request.include or ()):
        if name != INCLUDABLE:
            where = f"include[{index}]"
            raise invalid(f"{where} is {name[:80]!r}; only {INCLUDABLE} is served", where)
    for name in ("summary", "generate_summary"):
        if request.reasoning is not None and getattr(request.reasoning, name) not in (None, "auto"):
            where = f"reasoning.{name}"
            raise invalid(
                f"{where}: there are no summaries, reasoning comes as it is (leave it out)",
                where,
                "unsupported_parameter",
            )
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise invalid(
            "text.verbosity is not served (leave it out)", "text.verbosity", "unsupported_parameter"
        )
    check_metadata(request.metadata or {})


def check_metadata(metadata: dict[str, str]) -> None:
    """Raise for metadata beyond OpenAI's bounds.

    Raises:
        ApiError: 400.
    """
    if len(metadata) > MAX_METADATA:
        raise invalid(f"metadata holds {len(metadata)} texts; at most {MAX_METADATA} are allowed", "metadata")
    for name, text in metadata.items():
        if len(name) > MAX_METADATA_NAME or len(text) > MAX_METADATA_TEXT:
            raise invalid(
                f"metadata: names have at most {MAX_METADATA_NAME} characters, texts {MAX_METADATA_TEXT}",
                "metadata",
            )


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """Return the chat request that asks for the same.

    Raises:
        ApiError: 400, which names the field.
    """
    functions = [function(tool, index) for index, tool in enumerate(request.tools or ())]
    check_functions(functions, "tools[{}]")
    reasoning = request.reasoning
    return ChatRequest(
        **{name: getattr(request, name) for name in CHAT_FIELDS},
        messages=conversation(request.input, request.instructions),
        max_completion_tokens=request.max_output_tokens,
        tools=[Tool("function", one) for one in functions] or None,
        tool_choice=tool_choice(request.tool_choice, tuple(functions)),
        response_format=response_format(request.text),
        reasoning_effort=None if reasoning is None else reasoning.effort,
    )


def function(tool: ResponseTool, index: int) -> Function:
    """Return a tool's function.

    Raises:
        ApiError: 400 for a tool of another type.
    """
    if tool.type != "function":
        raise unserved_tool(tool.type, index)
    return Function(tool.name, tool.description, tool.parameters, tool.strict)


def refuse_tools(body: bytes) -> None:
    """Raise for the first tool of a type that is not served: its other fields are not known here, either.

    Raises:
        ApiError: 400 with the place of the type.
    """
    try:
        tools = msgspec.json.decode(body, type=ToolsAlone).tools
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise unserved_tool(kind, index)


def unserved_tool(kind: str, index: int) -> ApiError:
    """Return the 400 of a tool of another type."""
    where = f"tools[{index}].type"
    return invalid(
        f"{where} is {kind[:80]!r}; only function tools are served, which the client runs",
        where,
        "unsupported_tool",
    )


def tool_choice(given: ResponseToolChoice | None, functions: tuple[Function, ...]) -> ToolChoice | None:
    """Return a choice in chat's form.

    Raises:
        ApiError: 400, it names a tool that is not there.
    """
    if isinstance(given, NamedResponseTool):
        if functions:
            known(functions, given.name, "tool_choice.name")
        return NamedTool(NamedFunction(given.name))
    if isinstance(given, AllowedResponseTools):
        if not given.tools:
            raise invalid("tool_choice.tools is empty", "tool_choice.tools")
        if functions:
            for index, tool in enumerate(given.tools):
                known(functions, tool.name, f"tool_choice.tools[{index}].name")
        tools = [NamedTool(NamedFunction(tool.name)) for tool in given.tools]
        return AllowedTools(AllowedSet(given.mode, tools))
    return given


def response_format(given: TextOptions | None) -> ResponseFormat | None:
    """Return the text's form as chat requests have it.

    Raises:
        ApiError: 400 when the schema is missing, or has no place.
    """
    form = given.format if given is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ResponseFormat("json_object")
    for name in ("name", "schema"):
        if getattr(form, name) is None:
            raise invalid(f"text.format.{name} is required", f"text.format.{name}", "missing_field")
    check_depth(form.schema, "text.format.schema")
    return ResponseFormat("json_schema", JsonSchema(form.name or "", form.schema, form.strict))


def rename(error: ApiError) -> None:
    """Let an error about a field of a chat request name that of the response request, in its message too."""
    name = error.param
    if name is None:
        return
    if name.startswith("tools["):
        error.param = name.replace(".function.", ".", 1)
        error.message = error.message.replace(name, error.param, 1)
        return
    if name.startswith("messages["):  # of which items have become one
        error.param, error.message = "input", error.message.replace(name, "input: a call's arguments", 1)
        return
    if name not in NAMES:
        return
    error.param = NAMES[name]
    if error.message.startswith(name):
        error.message = error.param + error.message.removeprefix(name)
