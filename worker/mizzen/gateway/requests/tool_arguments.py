"""Tool calls in a conversation whose arguments are not JSON objects; some chat templates reject them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def find_unparsed_arguments(messages: Sequence[dict[str, Any]]) -> str | None:
    """Return the path of the first tool call arguments that are not an object; None if all are objects."""
    for index, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls", ())):
            if isinstance(call["function"]["arguments"], str):
                return f"messages[{index}].tool_calls[{number}].function.arguments"
    return None


def clear_unparsed_arguments(messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the messages, with an empty object in place of arguments that are not an object."""

    def clear_call(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if not isinstance(function["arguments"], str):
            return call
        return {**call, "function": {**function, "arguments": {}}}

    return tuple(
        {**message, "tool_calls": [clear_call(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    )
