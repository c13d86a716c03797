"""Check a request's tools and tool choice, and determine the calls that the model may make."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.tools.families import CallSchema
from mizzen.gateway.tools.relax_schema import find_subschema, relax_schema
from mizzen.gateway.tools.schema_check import MAX_DEPTH, find_schema_fault, is_too_deep
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
    allowed: tuple[Function, ...]
    """Tools that the model may call."""
    forced: bool
    """Whether the model must call a tool."""
    allow_parallel: bool
    """Whether the model may make several calls."""
    calls: tuple[CallSchema, ...]
    """Allowed tools as grammars need them."""

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Argument schemas of the allowed tools by name."""
        return {function.name: function.parameters or {} for function in self.allowed}

    @property
    def strict(self) -> bool:
        """Whether any tool requires arguments that conform to its schema."""
        return any(function.strict for function in self.allowed)

    @property
    def restricted(self) -> bool:
        """Whether some calls are not allowed that the model might want to make."""
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
        """Return the request field that holds a keyword the engine does not enforce; None if not found.

        `path` leads from a strict tool's schema to the keyword, with `/` between its steps.
        """
        for index, function in enumerate(self.functions):
            subschema = (
                find_subschema(function.parameters, path)
                if function.strict and function in self.allowed
                else None
            )
            if subschema is not None and keyword in subschema[0]:
                return f"tools[{index}].function.parameters{subschema[1]}.{keyword}"
        return None


def parse_tools(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> OfferedTools | None:
    """Return the tools that a chat request offers; None if no tool may be called.

    Raises:
        ApiError: 400 that names the field.
    """
    functions = tuple(tool.function for tool in tools or ())
    check_functions(functions, "tools[{}].function")
    return select_tools(functions, choice, parallel)


def select_tools(
    functions: tuple[Function, ...], choice: ToolChoice | None, parallel: bool | None
) -> OfferedTools | None:
    """Return the offered tools according to the tool choice.

    Raises:
        ApiError: 400 if the choice names an unknown tool.
    """
    if not functions:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice needs tools", "tool_choice")
        return None
    if choice == "none":
        return None
    allow_parallel = parallel is not False
    if isinstance(choice, NamedTool):
        named = (find_function(functions, choice.function.name, "tool_choice.function.name"),)
        return offer_tools(functions, named, forced=True, allow_parallel=False)
    if isinstance(choice, AllowedTools):
        field = "tool_choice.allowed_tools.tools[{}].function.name"
        allowed_set = choice.allowed_tools
        allowed = tuple(
            find_function(functions, tool.function.name, field.format(index))
            for index, tool in enumerate(allowed_set.tools)
        )
        if not allowed:
            raise invalid("tool_choice.allowed_tools.tools is empty", "tool_choice.allowed_tools.tools")
        return offer_tools(
            functions, allowed, forced=allowed_set.mode == "required", allow_parallel=allow_parallel
        )
    return offer_tools(functions, functions, forced=choice == "required", allow_parallel=allow_parallel)


def offer_tools(
    functions: tuple[Function, ...], allowed: tuple[Function, ...], *, forced: bool, allow_parallel: bool
) -> OfferedTools:
    """Return the tools of a request. Forced calls conform to their schemas unless `strict` is false."""
    calls = tuple(CallSchema(function.name, arguments_schema(function, forced)) for function in allowed)
    return OfferedTools(
        functions=functions, allowed=allowed, forced=forced, allow_parallel=allow_parallel, calls=calls
    )


def arguments_schema(function: Function, forced: bool) -> dict[str, Any]:
    """Return the schema for a call's arguments: the tool's own, or its enforceable part."""
    conforms = function.strict or (forced and function.strict is None)
    parameters = function.parameters
    if not conforms or parameters == {}:
        return ANY_OBJECT
    if parameters is None:
        return NO_ARGUMENTS
    schema = parameters if function.strict else relax_schema(parameters)
    return schema if any(key in schema for key in _TYPE_KEYS) else {"type": "object", **schema}


def find_function(functions: tuple[Function, ...], name: str, field: str) -> Function:
    """Return the function with a name.

    Raises:
        ApiError: 400 if there is no such function.
    """
    for function in functions:
        if function.name == name:
            return function
    names = ", ".join(function.name for function in functions)
    raise invalid(f"{field} is {name[:80]!r}, which is not one of the tools ({names[:500]})", field)


def check_functions(functions: Sequence[Function], field: str) -> None:
    """Check names and schemas; `where` is a function's path in the request with a `{}` for its index.

    Raises:
        ApiError: 400 that names the field.
    """
    if len(functions) > MAX_TOOLS:
        raise invalid(f"tools holds {len(functions)} tools; at most {MAX_TOOLS} are allowed", "tools")
    seen: set[str] = set()
    for index, function in enumerate(functions):
        path = field.format(index)
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
    """Check the schema of a tool's arguments.

    Raises:
        ApiError: 400 that names the field.
    """
    check_depth(schema, field)
    fault = find_schema_fault(schema)
    if fault is not None:
        raise invalid_schema(field + fault[0], fault[1])
    if schema.get("type", "object") != "object":
        raise invalid_schema(f"{field}.type", 'must be "object": arguments have names')


def check_depth(schema: object, field: str) -> None:
    """Check that a schema is not nested too deeply to be forwarded.

    Raises:
        ApiError: 400 that names the field.
    """
    if is_too_deep(schema):
        raise invalid_schema(field, f"is nested more than {MAX_DEPTH} levels deep")


def invalid_schema(field: str, reason: str) -> ApiError:
    """Return the 400 for an invalid schema."""
    return invalid(f"{field} {reason}", field, "invalid_schema")
