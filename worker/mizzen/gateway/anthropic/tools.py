# SPDX-License-Identifier: Apache-2.0
"""Convert the tools and the tool choice of a Messages request to those of a chat request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import Raw

from mizzen.gateway.anthropic.schemas import CustomTool, ToolChoiceOption
from mizzen.gateway.errors import invalid
from mizzen.gateway.fields.known import is_messages_hosted_tool
from mizzen.gateway.fields.rules import Rules, advise
from mizzen.gateway.fields.typed_objects import TypedObjects
from mizzen.gateway.tools.tool_schemas import Function, NamedFunction, NamedTool, Tool, ToolChoice

CUSTOM_RULES: Rules = {
    "allowed_callers": advise(["direct"]),
    "defer_loading": advise(False),
    "eager_input_streaming": advise(False),
    "input_examples": advise([]),
}


@dataclass(frozen=True, slots=True)
class MessagesTools:
    """Tools of a request that the client runs."""

    tools: tuple[Tool, ...]
    """The tools in the form of chat requests."""
    paths: tuple[str, ...]
    """Path of each of the tools in the client's request."""
    ignored: tuple[str, ...]
    """Paths of ignored fields, and the tools that are left out."""


class CustomToolParser:
    """Parser of the tools of Messages requests."""

    def __init__(self, *, strict_fields: bool) -> None:
        """Create a parser; with `strict_fields`, it rejects unknown fields, and tools that Anthropic runs."""
        self._strict = strict_fields
        types = {"custom": CustomTool}
        self._decoders = TypedObjects(types, {"custom": CUSTOM_RULES}, strict=strict_fields, default="custom")

    def parse(self, tools: Iterable[Raw]) -> MessagesTools:
        """Return the tools of a request.

        Raises:
            ApiError: 400 if a tool is invalid, or its type is not supported; the error names the field.
        """
        chat_tools: list[Tool] = []
        paths: list[str] = []
        ignored: list[str] = []
        for index, raw in enumerate(tools):
            path = f"tools[{index}]"
            kind = self._decoders.kind_of(raw, path) or "custom"
            if kind != "custom":
                ignored.append(leave_out_tool(kind, path, strict=self._strict))
                continue
            tool, names = self._decoders.decode(raw, kind, path)
            if isinstance(tool, CustomTool):
                function = Function(tool.name, tool.description, tool.input_schema, tool.strict)
                chat_tools.append(Tool("function", function))
                paths.append(path)
            ignored += [f"tools[].{name}" for name in names]
        return MessagesTools(tuple(chat_tools), tuple(paths), tuple(ignored))


def leave_out_tool(kind: object, path: str, *, strict: bool) -> str:
    """Return the path that names a tool of type `kind` among the ignored fields; `path` is the tool's path.

    Raises:
        ApiError: 400 if Anthropic does not run tools of this type, or with `strict`.
    """
    if not isinstance(kind, str) or strict or not is_messages_hosted_tool(kind):
        raise invalid(
            f"{path}.type is {str(kind)[:80]!r}; only tools with an input_schema (type custom) are supported",
            f"{path}.type",
            "unsupported_tool",
        )
    return f"tools[{kind}]"


def convert_tool_choice(choice: ToolChoiceOption | None, tools: MessagesTools) -> ToolChoice | None:
    """Convert a tool choice to the form of chat requests.

    Raises:
        ApiError: 400 if the name of the tool is missing, or the choice demands a call although the request
            has no tool that the client runs.
    """
    if choice is None:
        return None
    if choice.type in ("auto", "none"):
        return choice.type
    if not tools.tools:
        text = "tool_choice demands a call, but the request has no tools"
        left_out = " that the client runs" if tools.ignored else ""
        raise invalid(text + left_out, "tool_choice")
    if choice.type == "any":
        return "required"
    if choice.name is None:
        raise invalid("tool_choice.name is required with type tool", "tool_choice.name", "missing_field")
    return NamedTool(NamedFunction(choice.name))
