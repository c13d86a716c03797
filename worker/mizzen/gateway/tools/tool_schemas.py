# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of tools, tool choices and tool calls in requests and messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Function that the model may call."""

    name: Annotated[str, Meta(description="Name of the function.")]
    description: Annotated[
        str | None, Meta(description="Description of the function, passed to the chat template.")
    ] = None
    parameters: Annotated[
        dict[str, Any] | None,
        Meta(description="JSON schema of the arguments; without it, the function has no arguments."),
    ] = None
    strict: Annotated[
        bool | None,
        Meta(
            description="`true`: the arguments of every call conform to `parameters`, and a schema that "
            "cannot be enforced completely is rejected. `false`: the arguments are not constrained."
        ),
    ] = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """Tool that the model may call."""

    type: Annotated[str, Meta(description="`function`; tools that OpenAI hosts are left out.")]
    function: Annotated[
        Function | None, Meta(description="With type `function`: the function that the model may call.")
    ] = None


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    """Function referred to by its name."""

    name: Annotated[str, Meta(description="Name of the function.")]


class NamedTool(msgspec.Struct, forbid_unknown_fields=True, tag="function"):
    """Tool referred to by name; as a tool choice, the tool that must be called."""

    function: Annotated[NamedFunction, Meta(description="The function, by its name.")]


class AllowedSet(msgspec.Struct, forbid_unknown_fields=True):
    """Tools that may be called, and whether one of them must be called."""

    mode: Annotated[
        Literal["auto", "required"],
        Meta(description="`required`: the model must call one of the tools. `auto`: it may."),
    ]
    tools: Annotated[list[NamedTool], Meta(description="The allowed tools.")]


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True, tag="allowed_tools"):
    """Tool choice that allows only some of the tools."""

    allowed_tools: Annotated[
        AllowedSet, Meta(description="The allowed tools, and whether one must be called.")
    ]


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """Called function with its arguments."""

    name: Annotated[str, Meta(description="Name of the function.")]
    arguments: Annotated[
        str | dict[str, Any] | None, Meta(description="JSON text, as in a response, or a JSON object.")
    ] = None


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Tool call in a message of the assistant, or in a response."""

    function: Annotated[CalledFunction, Meta(description="The called function and its arguments.")]
    id: Annotated[
        str | None,
        Meta(description="Id of the call; the message with the result repeats it as `tool_call_id`."),
    ] = None
    type: Annotated[Literal["function"], Meta(description="Always `function`.")] = "function"
    index: Annotated[int | None, Meta(description="Position of the call among the message's calls.")] = None
