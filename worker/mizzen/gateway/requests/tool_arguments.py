"""Find or replace tool-call arguments that are not JSON objects, because some chat templates reject them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def find_unparsed_arguments(messages: Sequence[dict[str, Any]]) -> str | None:
    """Find the first call whose arguments are not an object; return the path of the arguments, or None."""
    for index, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls", ())):
            if isinstance(call["function"]["arguments"], str):
                return f"messages[{index}].tool_calls[{number}].function.arguments"
    return None


def clear_unparsed_arguments(messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the messages; tool-call arguments that are not an object are replaced by an empty object."""

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
