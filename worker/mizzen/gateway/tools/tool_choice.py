"""What a request says of tools, checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.tools.families import CallSchema
from mizzen.gateway.tools.relax_schema import place, widened
from mizzen.gateway.tools.schema_check import MAX_DEPTH, schema_error, too_deep
from mizzen.gateway.tools.structural_tags import ANY_OBJECT, NO_ARGUMENTS
from mizzen.gateway.tools.tool_schemas import AllowedTools, Function, NamedTool, Tool, ToolChoice

MAX_TOOLS = 128
_WHOLE = ("type", "$ref", "anyOf", "oneOf", "allOf")
"""Keys of schemas that say by themselves what a value is."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The tools of a request, and how they may be called."""

    all: tuple[Function, ...]
    """Those that the model is told of."""
    allowed: tuple[Function, ...]
    """Those that it may call."""
    forced: bool
    """Whether it must call one."""
    many: bool
    """Whether it may make several calls."""
    calls: tuple[CallSchema, ...]
    """Those that it may call, as a grammar sees them."""

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The tools that may be called: schemas of their arguments by their names."""
        return {function.name: function.parameters or {} for function in self.allowed}

    @property
    def strict(self) -> bool:
        """Whether a tool asks for arguments that conform to its schema."""
        return any(function.strict for function in self.allowed)

    @property
    def limited(self) -> bool:
        """Whether not all calls are allowed that the model might want to make."""
        return not self.many or len(self.allowed) < len(self.all)

    def for_template(self) -> list[dict[str, Any]]:
        """Return the tools as chat templates take them."""
        found: list[dict[str, Any]] = []
        for function in self.all:
            entry: dict[str, Any] = {"name": function.name}
            if function.description is not None:
                entry["description"] = function.description
            if function.parameters is not None:
                entry["parameters"] = function.parameters
            found.append({"type": "function", "function": entry})
        return found

    def find_schema_field(self, keyword: str, path: str) -> str | None:
        """Return where in the request a keyword stands that an engine does not enforce; None if nowhere.

        `path` leads there from a strict tool's schema, with `/` between its steps.
        """
        for index, function in enumerate(self.all):
            found = place(function.parameters, path) if function.strict and function in self.allowed else None
            if found is not None and keyword in found[0]:
                return f"tools[{index}].function.parameters{found[1]}.{keyword}"
        return None


def chosen(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> Tools | None:
    """Return the tools that a chat request offers; None when there are none to be called.

    Raises:
        ApiError: 400, which names the field.
    """
    functions = tuple(tool.function for tool in tools or ())
    check_functions(functions, "tools[{}].function")
    return select(functions, choice, parallel)


def select(functions: tuple[Function, ...], choice: ToolChoice | None, parallel: bool | None) -> Tools | None:
    """Return the tools that are offered, by what the request chooses among them.

    Raises:
        ApiError: 400, the choice names a tool that is not there.
    """
    if not functions:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice needs tools", "tool_choice")
        return None
    if choice == "none":
        return None
    many = parallel is not False
    if isinstance(choice, NamedTool):
        one = (known(functions, choice.function.name, "tool_choice.function.name"),)
        return offered(functions, one, forced=True, many=False)
    if isinstance(choice, AllowedTools):
        where = "tool_choice.allowed_tools.tools[{}].function.name"
        given = choice.allowed_tools
        allowed = tuple(
            known(functions, tool.function.name, where.format(index))
            for index, tool in enumerate(given.tools)
        )
        if not allowed:
            raise invalid("tool_choice.allowed_tools.tools is empty", "tool_choice.allowed_tools.tools")
        return offered(functions, allowed, forced=given.mode == "required", many=many)
    return offered(functions, functions, forced=choice == "required", many=many)


def offered(
    functions: tuple[Function, ...], allowed: tuple[Function, ...], *, forced: bool, many: bool
) -> Tools:
    """Return the tools of a request. Forced calls conform to their schemas unless `strict` is false."""
    calls = tuple(CallSchema(one.name, call_schema(one, forced)) for one in allowed)
    return Tools(all=functions, allowed=allowed, forced=forced, many=many, calls=calls)


def call_schema(function: Function, forced: bool) -> dict[str, Any]:
    """Return what a call's arguments conform to: the tool's schema, or what can be enforced of it."""
    conforms = function.strict or (forced and function.strict is None)
    given = function.parameters
    if not conforms or given == {}:
        return ANY_OBJECT
    if given is None:
        return NO_ARGUMENTS
    found = given if function.strict else widened(given)
    return found if any(key in found for key in _WHOLE) else {"type": "object", **found}


def known(functions: tuple[Function, ...], name: str, where: str) -> Function:
    """Return the function of a name.

    Raises:
        ApiError: 400, there is none.
    """
    for function in functions:
        if function.name == name:
            return function
    names = ", ".join(function.name for function in functions)
    raise invalid(f"{where} is {name[:80]!r}, which is none of the tools ({names[:500]})", where)


def check_functions(functions: Sequence[Function], where: str) -> None:
    """Check names and schemas; `where` is a function's path in the request, with a place for its index.

    Raises:
        ApiError: 400, which names the field.
    """
    if len(functions) > MAX_TOOLS:
        raise invalid(f"tools holds {len(functions)} tools; at most {MAX_TOOLS} are allowed", "tools")
    seen: set[str] = set()
    for index, function in enumerate(functions):
        path = where.format(index)
        name = f"{path}.name"
        if not _NAME.fullmatch(function.name):
            raise invalid(
                f"{name} is {function.name[:80]!r}; it must have 1 to 64 letters, digits, _ and -", name
            )
        if function.name in seen:
            raise invalid(f"{name} is {function.name!r}, which another tool has already", name)
        seen.add(function.name)
        if function.parameters is not None:
            check_parameters(function.parameters, f"{path}.parameters")


def check_parameters(schema: dict[str, Any], where: str) -> None:
    """Check a schema of arguments.

    Raises:
        ApiError: 400, which names the field.
    """
    check_depth(schema, where)
    found = schema_error(schema)
    if found is not None:
        raise bad_schema(where + found[0], found[1])
    if schema.get("type", "object") != "object":
        raise bad_schema(f"{where}.type", 'must be "object": arguments have names')


def check_depth(schema: object, where: str) -> None:
    """Check that a schema can be passed on.

    Raises:
        ApiError: 400, which names the field.
    """
    if too_deep(schema):
        raise bad_schema(where, f"is nested more than {MAX_DEPTH} levels deep")


def bad_schema(where: str, reason: str) -> ApiError:
    """Return the 400 of a schema that is none."""
    return invalid(f"{where} {reason}", where, "invalid_schema")
