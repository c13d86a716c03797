"""Arguments of tool calls in a conversation that are not JSON objects, which some chat templates reject."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def find_unparsed_arguments(messages: Sequence[dict[str, Any]]) -> str | None:
    """Return the field of the first call whose arguments are not an object; None without one."""
    for index, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls", ())):
            if isinstance(call["function"]["arguments"], str):
                return f"messages[{index}].tool_calls[{number}].function.arguments"
    return None


def clear_unparsed_arguments(messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the messages with empty arguments for calls whose arguments are not an object."""

    def readable(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if not isinstance(function["arguments"], str):
            return call
        return {**call, "function": {**function, "arguments": {}}}

    return tuple(
        {**message, "tool_calls": [readable(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    )
