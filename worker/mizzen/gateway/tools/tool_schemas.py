"""JSON schemas of tools, tool choices and tool calls in requests and messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """Tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    """Name of a function."""

    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True, tag="function"):
    """Tool that must be called."""

    function: NamedFunction


class AllowedSet(msgspec.Struct, forbid_unknown_fields=True):
    """Subset of the tools."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True, tag="allowed_tools"):
    """Subset of the tools that may be called."""

    allowed_tools: AllowedSet


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """Called function with its arguments."""

    name: str
    arguments: Annotated[
        str | dict[str, Any] | None, Meta(description="JSON text, as in an answer, or the object itself.")
    ] = None


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Tool call in a message of the assistant, or in a response."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
