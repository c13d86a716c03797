"""Messages of a conversation: from a request's to what chat templates take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.tools.tool_schemas import CalledFunction, ToolCall

UNSERVED_PARTS = ("image_url", "input_audio", "file", "audio_url", "video_url")


class Part(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a message's content."""

    type: Annotated[
        str, Meta(description="`text`, or `refusal` in an assistant's message; other types are rejected.")
    ]
    text: str | None = None
    refusal: str | None = None
    image_url: Annotated[Any, Meta(description="Not supported.")] = None
    input_audio: Annotated[Any, Meta(description="Not supported.")] = None
    audio_url: Annotated[Any, Meta(description="Not supported.")] = None
    video_url: Annotated[Any, Meta(description="Not supported.")] = None
    file: Annotated[Any, Meta(description="Not supported.")] = None


class Message(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A message of a conversation."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        Meta(description="Author of the message; templates receive `developer` as `system`."),
    ]
    content: Annotated[
        str | list[Part] | None, Meta(description="Text, or text parts, which are joined by line breaks.")
    ] = None
    name: Annotated[str | None, Meta(description="Passed to the template.")] = None
    tool_calls: Annotated[
        list[ToolCall] | None, Meta(description="Calls made by the assistant; `content` may then be missing.")
    ] = None
    tool_call_id: Annotated[str | None, Meta(description="Id of the call that a tool message answers.")] = (
        None
    )
    reasoning_content: Annotated[str | None, Meta(description="Reasoning of the assistant.")] = None
    reasoning: Annotated[str | None, Meta(description="Same as `reasoning_content`.")] = None
    refusal: Annotated[
        str | None, Meta(description="Refusal of the assistant, used as content if there is no other.")
    ] = None
    function_call: Annotated[CalledFunction | None, Meta(description="Older form of `tool_calls`.")] = None
    audio: Annotated[Any, Meta(description="Not supported.")] = None
    annotations: Annotated[Any, Meta(description="Accepted, not used.")] = None


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as templates want them.

    Raises:
        ApiError: 400 for a message without content, or one that the role does not have.
    """
    if not messages:
        raise invalid("messages must hold at least one message", "messages")
    return [entry(message, f"messages[{index}]") for index, message in enumerate(messages)]


def entry(message: Message, where: str) -> dict[str, Any]:
    """Return one message as templates want it: arguments of calls as objects, `content` always there.

    Raises:
        ApiError: as `conversation`.
    """
    if message.audio is not None:
        raise unserved(f"{where}.audio")
    calls = list(message.tool_calls or ())
    if message.function_call is not None:
        calls.append(ToolCall(message.function_call))
    if calls and message.role != "assistant":
        raise invalid(f"{where}.tool_calls: only an assistant's message has them", f"{where}.tool_calls")
    if message.tool_call_id is not None and message.role != "tool":
        raise invalid(f"{where}.tool_call_id: only a tool's message has one", f"{where}.tool_call_id")
    content = plain_content(message, where)
    if content is None and not calls and message.reasoning_content is None and message.reasoning is None:
        raise invalid(f"{where}.content is required", f"{where}.content", "missing_field")
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    found: dict[str, Any] = {"role": role, "content": content or ""}
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if getattr(message, name) is not None:
            found[name] = getattr(message, name)
    if calls:
        found["tool_calls"] = [called(call) for call in calls]
    return found


def plain_content(message: Message, where: str) -> str | None:
    """Return a message's text.

    Raises:
        ApiError: 400 for a part that is no text.
    """
    content = message.content
    if isinstance(content, list):
        parts = [part_text(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
        return "\n".join(parts)
    if not content and message.refusal:
        return message.refusal
    return content


def part_text(part: Part, where: str) -> str:
    """Return a content part's text.

    Raises:
        ApiError: 400 for a part of another type.
    """
    for name in UNSERVED_PARTS:
        if part.type == name or getattr(part, name) is not None:
            raise invalid(
                f"{where}: {name} parts are not served; the model reads text only",
                f"{where}.type" if part.type == name else f"{where}.{name}",
                "unsupported_content",
            )
    if part.type not in ("text", "refusal"):
        raise invalid(
            f"{where}.type is {part.type[:80]!r}; only parts of type text are served",
            f"{where}.type",
            "unsupported_content",
        )
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise invalid(f"{where}.{part.type} is required", f"{where}.{part.type}", "missing_field")
    return text


def called(call: ToolCall) -> dict[str, Any]:
    """Return a call as templates want it."""
    found: dict[str, Any] = {
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments(call.function.arguments)},
    }
    return found if call.id is None else {"id": call.id, **found}


def arguments(given: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """Return a call's arguments as an object, or the text as it is where it is none.

    Models write broken JSON, and answers are cut: clients send back what they got, for the model to see it.
    """
    if given is None or isinstance(given, dict):
        return given or {}
    try:
        read = msgspec.json.decode(given or "null")
    except (msgspec.DecodeError, RecursionError):
        return given
    return read if isinstance(read, dict) else {} if read is None else given


def unserved(name: str) -> ApiError:
    """Return the 400 of a field that is known and not served."""
    return invalid(f"{name} is not served (leave it out)", name, "unsupported_parameter")
