# SPDX-License-Identifier: Apache-2.0
"""Convert the tools and the tool choice of a Responses request to those of a chat request.

Functions of namespaces become ordinary functions, and tools that OpenAI hosts are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw

from mizzen.gateway.errors import invalid
from mizzen.gateway.fields.typed_objects import TypedObjects
from mizzen.gateway.responses.schemas import (
    AllowedResponseTools,
    NamedResponseTool,
    NamespaceTool,
    ResponseTool,
    ResponseToolChoice,
)
from mizzen.gateway.tools.tool_choice import check_functions, find_function, ignore_tool
from mizzen.gateway.tools.tool_schemas import (
    AllowedSet,
    AllowedTools,
    Function,
    NamedFunction,
    NamedTool,
    ToolChoice,
)

TOOL_TYPES: dict[str, type[msgspec.Struct]] = {"function": ResponseTool, "namespace": NamespaceTool}


@dataclass(frozen=True, slots=True)
class CallName:
    """Name of a function in calls, as the client knows it."""

    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """Functions of a request, including those of its namespaces."""

    functions: Mapping[str, Function] = field(default_factory=dict)
    """Functions as the model knows them, by their paths in the body."""
    call_names: Mapping[str, CallName] = field(default_factory=dict)
    """Client's name of each function, by the name that the model knows."""
    model_names: Mapping[CallName, str] = field(default_factory=dict)
    """Name that the model knows of each function, by the client's name."""
    echo: tuple[dict[str, Any], ...] = ()
    """The functions and namespaces in the form in which the response repeats them."""
    ignored: tuple[str, ...] = ()
    """Paths of ignored fields, and the hosted tools that are left out."""

    def model_name(self, call: CallName) -> str:
        """Return the name by which the model knows a function, which the request may no longer have."""
        return self.model_names.get(call, call.name)


class ToolsParser:
    """Parser of the tools of Responses requests."""

    def __init__(self, *, strict_fields: bool) -> None:
        """Create a parser; with `strict_fields`, it accepts only functions, without unknown fields."""
        self._strict = strict_fields
        self._decoders = TypedObjects(TOOL_TYPES, strict=strict_fields)

    def parse(self, tools: Iterable[Raw]) -> ResponseTools:
        """Return the functions of a request.

        Raises:
            ApiError: 400 if a tool is invalid, or its type is not supported; the error names the field.
        """
        found: dict[str, tuple[ResponseTool, str | None]] = {}
        ignored: list[str] = []
        echo: list[dict[str, Any]] = []
        for index, raw in enumerate(tools):
            tool = self._decode(raw, f"tools[{index}]", "tools[]", ignored)
            if isinstance(tool, NamespaceTool):
                inner = self._parse_namespace(tool, f"tools[{index}]", ignored)
                found.update({path: (function, tool.name) for path, function in inner.items()})
                echo.append(echo_namespace(tool, inner.values()))
            elif isinstance(tool, ResponseTool):
                found[f"tools[{index}]"] = (tool, None)
                echo.append(echo_function(tool))
        return new_response_tools(found, echo, ignored)

    def _parse_namespace(
        self, namespace: NamespaceTool, path: str, ignored: list[str]
    ) -> dict[str, ResponseTool]:
        """Return the functions of the namespace at `path`, by their paths."""
        if namespace.description is not None:
            ignored.append("tools[].description")
        functions: dict[str, ResponseTool] = {}
        for index, raw in enumerate(namespace.tools):
            field_path = f"{path}.tools[{index}]"
            tool = self._decode(raw, field_path, "tools[].tools[]", ignored)
            if isinstance(tool, NamespaceTool):
                text = f"{field_path}.type: a namespace cannot contain another namespace"
                raise invalid(text, f"{field_path}.type", "unsupported_tool")
            if isinstance(tool, ResponseTool):
                functions[field_path] = tool
        return functions

    def _decode(self, raw: Raw, path: str, general_path: str, ignored: list[str]) -> msgspec.Struct | None:
        """Return a tool, or None if it is left out; add its ignored fields to `ignored`."""
        kind = self._decoders.kind_of(raw, path)
        if not isinstance(kind, str):
            raise invalid(f"{path}.type is required, and must be a string", f"{path}.type", "missing_field")
        if kind not in TOOL_TYPES or (self._strict and kind != "function"):
            ignored.append(ignore_tool(kind, path, strict=self._strict))
            return None
        tool, names = self._decoders.decode(raw, kind, path)
        ignored += [f"{general_path}.{name}" for name in names]
        return tool


def new_response_tools(
    found: Mapping[str, tuple[ResponseTool, str | None]], echo: list[dict[str, Any]], ignored: list[str]
) -> ResponseTools:
    """Return the functions under names that are unique.

    Args:
        found: The functions by their paths, each with the name of its namespace.
        echo: The tools in the form in which the response repeats them.
        ignored: Paths of ignored fields.

    Raises:
        ApiError: 400 if there are too many functions, or a name or schema is invalid; the error names the
            field.
    """
    counts = Counter(tool.name for tool, _ in found.values())
    functions: dict[str, Function] = {}
    call_names: dict[str, CallName] = {}
    for path, (tool, namespace) in found.items():
        name = tool.name
        if namespace is not None and counts[name] > 1:
            name = f"{namespace.rstrip('_')}__{name}"
        functions[path] = Function(name, tool.description, tool.parameters, tool.strict)
        call_names[name] = CallName(tool.name, namespace)
    check_functions(functions)
    return ResponseTools(
        functions=functions,
        call_names=call_names,
        model_names={call: name for name, call in call_names.items()},
        echo=tuple(echo),
        ignored=tuple(ignored),
    )


def echo_function(tool: ResponseTool) -> dict[str, Any]:
    """Return a function tool in the form in which the response repeats it."""
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def echo_namespace(namespace: NamespaceTool, functions: Iterable[ResponseTool]) -> dict[str, Any]:
    """Return a namespace in the form in which the response repeats it."""
    return {
        "type": "namespace",
        "name": namespace.name,
        "description": namespace.description or "",
        "tools": [echo_function(function) for function in functions],
    }


def chat_tool_choice(
    choice: ResponseToolChoice | None, tools: ResponseTools, *, strict_fields: bool
) -> tuple[ToolChoice | None, list[str]]:
    """Convert a tool choice to the form of chat requests, and list the hosted tools that it leaves out.

    Raises:
        ApiError: 400 if the choice names an unknown tool, allows no functions, or demands a call although the
            request has no functions.
    """
    functions = tuple(tools.functions.values())
    if isinstance(choice, NamedResponseTool):
        if functions:
            find_function(functions, choice.name, "tool_choice.name")
        return NamedTool(NamedFunction(choice.name)), []
    if isinstance(choice, AllowedResponseTools):
        return allowed_tools(choice, functions, strict_fields=strict_fields)
    if choice == "required" and not functions and tools.ignored:
        raise invalid("tool_choice demands a call, but no tool of the request is a function", "tool_choice")
    return choice, []


def allowed_tools(
    choice: AllowedResponseTools, functions: tuple[Function, ...], *, strict_fields: bool
) -> tuple[AllowedTools, list[str]]:
    """Convert a choice among allowed tools, and list the hosted tools that it leaves out.

    Raises:
        ApiError: 400 if the choice allows no functions, or names an unknown tool.
    """
    names: list[str] = []
    hosted: list[str] = []
    for index, tool in enumerate(choice.tools):
        path = f"tool_choice.tools[{index}]"
        if tool.type != "function":
            hosted.append(ignore_tool(tool.type, path, strict=strict_fields))
            continue
        if tool.name is None:
            raise invalid(f"{path}.name is required", f"{path}.name", "missing_field")
        if functions:
            find_function(functions, tool.name, f"{path}.name")
        names.append(tool.name)
    if not names:
        reason = "names no function, and hosted tools are not supported" if hosted else "is empty"
        raise invalid(f"tool_choice.tools {reason}", "tool_choice.tools")
    return AllowedTools(AllowedSet(choice.mode, [NamedTool(NamedFunction(name)) for name in names])), hosted
