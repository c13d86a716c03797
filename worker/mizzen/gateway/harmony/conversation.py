# SPDX-License-Identifier: Apache-2.0
"""Conversations in the form that chat templates of the harmony format accept.

Such templates show only the first system message, and reject a message that has calls, text and reasoning.
They drop the reasoning of turns that are finished, and keep that of the calls of the current turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mizzen.gateway.harmony.header import ASSISTANT, COMMENTARY
from mizzen.gateway.harmony.markers import CHANNEL, END, MESSAGE, START
from mizzen.gateway.text.template import REASONING_FIELDS

EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Effort that the models know, for each other value of `reasoning_effort`."""
_PREAMBLE = f"{END}{START}{ASSISTANT}{CHANNEL}{COMMENTARY}{MESSAGE}"
"""Text between reasoning and a text for the user, which are two messages."""


def arrange_messages(messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return a conversation in the form that chat templates accept.

    All system messages become the first message. Successive messages of the assistant become one if the last
    has calls, or the first only reasoning. If a message has calls, text and reasoning, the text follows the
    reasoning as a message of its own.
    """
    system = [message for message in messages if message["role"] == "system"]
    arranged: list[dict[str, Any]] = []
    if system:
        arranged.append({**system[0], "content": join_texts(message["content"] for message in system)})
    for message in messages:
        if message["role"] == "system":
            continue
        while message["role"] == ASSISTANT and arranged and may_continue(arranged[-1], message):
            message = join_messages(arranged.pop(), message)
        if arranged and is_reasoning_only(arranged[-1]):
            arranged.pop()
        arranged.append(message)
    return tuple(preamble_as_reasoning(message) for message in arranged)


def may_continue(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether a message and the assistant's message after it belong together."""
    open_turn = first["role"] == ASSISTANT and not first.get("tool_calls")
    return open_turn and bool(second.get("tool_calls") or not first["content"])


def is_reasoning_only(message: dict[str, Any]) -> bool:
    """Return whether a message is the assistant's and has neither text nor calls."""
    return message["role"] == ASSISTANT and not message["content"] and not message.get("tool_calls")


def join_messages(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return one message with the text and the reasoning of two, and the calls of the second."""
    joined = {key: value for key, value in second.items() if key not in REASONING_FIELDS}
    joined["content"] = join_texts((first["content"], second["content"]))
    reasoning = join_texts((reasoning_of(first), reasoning_of(second)))
    return {**joined, "reasoning_content": reasoning} if reasoning else joined


def preamble_as_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in which text beside calls and reasoning is part of the reasoning."""
    reasoning = reasoning_of(message)
    if not (message.get("tool_calls") and message["content"] and reasoning):
        return message
    rest = {key: value for key, value in message.items() if key not in REASONING_FIELDS}
    return {**rest, "content": "", "reasoning_content": f"{reasoning}{_PREAMBLE}{message['content']}"}


def reasoning_of(message: dict[str, Any]) -> str:
    """Return the reasoning of a message; empty if it has none."""
    return next((message[key] for key in REASONING_FIELDS if message.get(key)), "")


def join_texts(texts: Any) -> str:
    """Join texts by blank lines; empty texts are left out."""
    return "\n\n".join(text for text in texts if text)
