# SPDX-License-Identifier: Apache-2.0
"""Check a request's tools and tool choice, and determine the calls that the model may make."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mizzen.common.schema_check import MAX_DEPTH, find_schema_fault, is_too_deep
from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.fields.known import is_hosted_tool
from mizzen.gateway.tools.call_formats import CallSchema
from mizzen.gateway.tools.relax_schema import find_subschema, relax_schema
from mizzen.gateway.tools.structural_tags import ANY_OBJECT, NO_ARGUMENTS
from mizzen.gateway.tools.tool_schemas import AllowedTools, Function, NamedTool, Tool, ToolChoice

MAX_TOOLS = 128
_TYPE_KEYS = ("type", "$ref", "anyOf", "oneOf", "allOf")
"""Schema keywords that determine a value's type on their own."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTools:
    """Tools of a request, and how they may be called."""

    functions: tuple[Function, ...]
    """Tools that are shown to the model."""
    paths: tuple[str, ...]
    """Path of each of the functions in the request body."""
    allowed: tuple[Function, ...]
    """Tools that the model may call."""
    forced: bool
    """True if the model must call a tool."""
    allow_parallel: bool
    """True if the model may make several calls."""
    calls: tuple[CallSchema, ...]
    """Names and argument schemas of the allowed tools, for grammars."""

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Argument schemas of the allowed tools by name."""
        return {function.name: function.parameters or {} for function in self.allowed}

    @property
    def strict(self) -> bool:
        """True if any allowed tool requires arguments that conform to its schema."""
        return any(function.strict for function in self.allowed)

    @property
    def restricted(self) -> bool:
        """True if the request forbids parallel calls, or forbids calling some of its tools."""
        return not self.allow_parallel or len(self.allowed) < len(self.functions)

    def template_tools(self) -> list[dict[str, Any]]:
        """Return the tools in the form that chat templates expect."""
        tools: list[dict[str, Any]] = []
        for function in self.functions:
            entry: dict[str, Any] = {"name": function.name}
            if function.description is not None:
                entry["description"] = function.description
            if function.parameters is not None:
                entry["parameters"] = function.parameters
            tools.append({"type": "function", "function": entry})
        return tools

    def find_schema_field(self, keyword: str, path: str) -> str | None:
        """Return the path, in the request body, of a schema keyword that an engine does not enforce.

        `path` leads from the root of a tool's schema to the subschema with the keyword, with `/` between its
        steps. Return None if no strict tool has the keyword there.
        """
        for field, function in zip(self.paths, self.functions, strict=True):
            subschema = (
                find_subschema(function.parameters, path)
                if function.strict and function in self.allowed
                else None
            )
            if subschema is not None and keyword in subschema[0]:
                return f"{field}.parameters{subschema[1]}.{keyword}"
        return None


def parse_tools(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> OfferedTools | None:
    """Return the tools that a chat request offers; None if no tool may be called.

    Raises:
        ApiError: 400 if a tool or the tool choice is invalid; the error names the field.
    """
    given = {
        f"tools[{index}].function": tool.function
        for index, tool in enumerate(tools or ())
        if tool.function is not None and tool.type == "function"
    }
    check_functions(given)
    if tools and not given and choice not in (None, "none", "auto"):
        raise invalid("tool_choice demands a call, but no tool of the request is a function", "tool_choice")
    return select_tools(given, choice, parallel)


def find_hosted_tools(tools: Sequence[Tool], *, strict: bool) -> list[str]:
    """Return, for each tool that OpenAI would host, the path that names it among the ignored fields.

    Raises:
        ApiError: 400 if a function is missing, or if a tool has an unsupported type; with `strict`, types of
            hosted tools are not supported either.
    """
    hosted: list[str] = []
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        if tool.type != "function":
            hosted.append(ignore_tool(tool.type, field, strict=strict))
        elif tool.function is None:
            raise invalid(f"{field}.function is required", f"{field}.function", "missing_field")
    return hosted


def ignore_tool(kind: str, field: str, *, strict: bool) -> str:
    """Return the path that names a tool of type `kind` among the ignored fields; `field` is its path.

    Raises:
        ApiError: 400 if the type is not that of a hosted tool, or with `strict`.
    """
    if strict or not is_hosted_tool(kind):
        raise invalid(
            f"{field}.type is {kind[:80]!r}; only function tools, which the client runs, are supported",
            f"{field}.type",
            "unsupported_tool",
        )
    return f"tools[{kind}]"


def select_tools(
    given: Mapping[str, Function], choice: ToolChoice | None, parallel: bool | None
) -> OfferedTools | None:
    """Return the tools to offer according to the tool choice; None if no tool may be called.

    `given` maps the path of each function in the request body to the function.

    Raises:
        ApiError: 400 if the choice names an unknown tool, allows no tools, or is set without tools.
    """
    if not given:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice needs tools", "tool_choice")
        return None
    if choice == "none":
        return None
    functions = tuple(given.values())
    allow_parallel = parallel is not False
    if isinstance(choice, NamedTool):
        named = (find_function(functions, choice.function.name, "tool_choice.function.name"),)
        return offer_tools(given, named, forced=True, allow_parallel=False)
    if isinstance(choice, AllowedTools):
        field = "tool_choice.allowed_tools.tools[{}].function.name"
        allowed_set = choice.allowed_tools
        allowed = tuple(
            find_function(functions, tool.function.name, field.format(index))
            for index, tool in enumerate(allowed_set.tools)
        )
        if not allowed:
            raise invalid("tool_choice.allowed_tools.tools is empty", "tool_choice.allowed_tools.tools")
        forced = allowed_set.mode == "required"
        return offer_tools(given, allowed, forced=forced, allow_parallel=allow_parallel)
    return offer_tools(given, functions, forced=choice == "required", allow_parallel=allow_parallel)


def offer_tools(
    given: Mapping[str, Function], allowed: tuple[Function, ...], *, forced: bool, allow_parallel: bool
) -> OfferedTools:
    """Return the tools to offer. Forced calls conform to the tools' schemas unless `strict` is false."""
    calls = tuple(CallSchema(function.name, arguments_schema(function, forced)) for function in allowed)
    return OfferedTools(
        functions=tuple(given.values()),
        paths=tuple(given),
        allowed=allowed,
        forced=forced,
        allow_parallel=allow_parallel,
        calls=calls,
    )


def arguments_schema(function: Function, forced: bool) -> dict[str, Any]:
    """Return the schema that a grammar enforces for the arguments of a call.

    It is the tool's own schema if `strict` is true, its enforceable part if the call is forced and `strict`
    is not set, and otherwise a schema that accepts any object.
    """
    conforms = function.strict or (forced and function.strict is None)
    parameters = function.parameters
    if not conforms or parameters == {}:
        return ANY_OBJECT
    if parameters is None:
        return NO_ARGUMENTS
    schema = parameters if function.strict else relax_schema(parameters)
    return schema if any(key in schema for key in _TYPE_KEYS) else {"type": "object", **schema}


def find_function(functions: tuple[Function, ...], name: str, field: str) -> Function:
    """Return the function called `name`; `field` is the request field that contains the name.

    Raises:
        ApiError: 400 if no function has this name.
    """
    for function in functions:
        if function.name == name:
            return function
    names = ", ".join(function.name for function in functions)
    raise invalid(f"{field} is {name[:80]!r}, which is not one of the tools ({names[:500]})", field)


def check_functions(functions: Mapping[str, Function]) -> None:
    """Check the names and schemas of functions, which are mapped from their paths in the request body.

    Raises:
        ApiError: 400 if there are too many functions, or a name or schema is invalid; the error names the
            field.
    """
    if len(functions) > MAX_TOOLS:
        raise invalid(f"tools holds {len(functions)} tools; at most {MAX_TOOLS} are allowed", "tools")
    seen: set[str] = set()
    for path, function in functions.items():
        name = f"{path}.name"
        if not _NAME.fullmatch(function.name):
            raise invalid(
                f"{name} is {function.name[:80]!r}; it must have 1 to 64 letters, digits, _ and -", name
            )
        if function.name in seen:
            raise invalid(f"{name} is {function.name!r}, which another tool already has", name)
        seen.add(function.name)
        if function.parameters is not None:
            check_parameters(function.parameters, f"{path}.parameters")


def check_parameters(schema: dict[str, Any], field: str) -> None:
    """Check the schema of a tool's arguments, which is in field `field`.

    Raises:
        ApiError: 400 if the schema is malformed, nested too deeply, or does not describe an object.
    """
    check_depth(schema, field)
    fault = find_schema_fault(schema)
    if fault is not None:
        raise invalid_schema(field + fault[0], fault[1])
    if schema.get("type", "object") != "object":
        raise invalid_schema(f"{field}.type", 'must be "object": arguments have names')


def check_depth(schema: object, field: str) -> None:
    """Check that the schema in field `field` is nested at most `MAX_DEPTH` levels deep.

    Raises:
        ApiError: 400 if it is nested more deeply.
    """
    if is_too_deep(schema):
        raise invalid_schema(field, f"is nested more than {MAX_DEPTH} levels deep")


def invalid_schema(field: str, reason: str) -> ApiError:
    """Return a 400 error for an invalid schema."""
    return invalid(f"{field} {reason}", field, "invalid_schema")
