"""Tools in requests and in messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function that a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool that a model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    """Name of a function."""

    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True, tag="function"):
    """The tool that must be called."""

    function: NamedFunction


class AllowedSet(msgspec.Struct, forbid_unknown_fields=True):
    """A subset of the tools."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True, tag="allowed_tools"):
    """The subset of the tools that may be called."""

    allowed_tools: AllowedSet


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """A called function with its arguments."""

    name: str
    arguments: Annotated[
        str | dict[str, Any] | None, Meta(description="JSON text, as in an answer, or the object itself.")
    ] = None


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A call in an assistant's message or in an answer."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
