"""MODULE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def find_unparsed_arguments(messages: Sequence[dict[str, Any]]) -> str | None:
    """Return the place of the first call whose arguments are no object; None where there is none."""
    for index, message in enumerate(messages):
        for place, call in enumerate(message.get("tool_calls", ())):
            if isinstance(call["function"]["arguments"], str):
                return f"messages[{index}].tool_calls[{place}].function.arguments"
    return None


def clear_unparsed_arguments(messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return messages with empty arguments where those of a call are no object."""

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
