"""Items of a conversation: from a request's `input` to chat messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.openai.decode_body import validation_error
from mizzen.gateway.openai.messages import Message
from mizzen.gateway.tools.tool_schemas import CalledFunction, ToolCall

MAX_ITEMS = 65_536
UNSERVED_PARTS = ("input_image", "input_file", "input_audio")
NOT_STORED = "nothing is stored here: send the items themselves in input"

T = TypeVar("T", bound=msgspec.Struct)


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    image_url: Any = None
    file_id: Any = None
    detail: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    input_audio: Any = None


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionCallOutput(msgspec.Struct, forbid_unknown_fields=True):
    """What a called function gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: str | None = None


class ReasoningText(msgspec.Struct, forbid_unknown_fields=True):
    """A text of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True):
    """What the model thought."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None
    status: str | None = None


KINDS: dict[str, type[msgspec.Struct]] = {
    "message": InputMessage,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": ReasoningItem,
}


def conversation(given: str | Sequence[dict[str, Any]], instructions: str | None) -> list[Message]:
    """Return a request's input as chat messages.

    What an assistant thought, said and called in a row is one message, for that is what templates know; so
    are the instructions and system messages that come first.

    Raises:
        ApiError: 400, which names the item and its field.
    """
    turns = Turns(instructions)
    if isinstance(given, str):
        turns.message("user", given)
        return turns.end()
    if not given:
        raise invalid("input must hold at least one item", "input")
    if len(given) > MAX_ITEMS:
        raise invalid(f"input holds {len(given)} items; at most {MAX_ITEMS} are allowed", "input")
    for index, item in enumerate(given):
        add(turns, read(item, f"input[{index}]"), f"input[{index}]")
    return turns.end()


class Turns:
    """Messages as they grow out of items."""

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[Message] = []
        self.calls: set[str] = set()
        """Ids of the calls so far."""
        self._opening: list[str] = []
        """Texts of the first message, where it is the system's."""
        if instructions is not None:
            self.message("system", instructions)

    def message(self, role: str, content: str) -> None:
        """Add a message."""
        last = self.messages[-1] if self.messages else None
        if role == "system" and len(self.messages) == len(self._opening[:1]):
            self.messages = self.messages or [Message("system")]
            self._opening.append(content)
        elif role == "assistant" and last is not None and is_open(last):
            last.content = content
        else:
            self.messages.append(Message(role, content))  # type: ignore[arg-type]

    def reasoning(self, text: str) -> None:
        """Begin an assistant's message with its reasoning."""
        self.messages.append(Message("assistant", reasoning_content=text))

    def call(self, call: FunctionCall) -> None:
        """Add a call to the assistant's message."""
        self.calls.add(call.call_id)
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant":
            last = Message("assistant")
            self.messages.append(last)
        made = ToolCall(CalledFunction(call.name, call.arguments), call.call_id)
        if last.tool_calls is None:
            last.tool_calls = []
        last.tool_calls.append(made)

    def output(self, call_id: str, content: str) -> None:
        """Add what a call gave."""
        self.messages.append(Message("tool", content, tool_call_id=call_id))

    def end(self) -> list[Message]:
        """Return all messages."""
        if self._opening:
            self.messages[0].content = "\n\n".join(self._opening)
        return self.messages


def is_open(message: Message) -> bool:
    """Tell whether a message is an assistant's that has only thought so far."""
    return message.role == "assistant" and message.content is None and not message.tool_calls


def read(item: dict[str, Any], where: str) -> msgspec.Struct:
    """Return an item. Fields of null say nothing, whatever their names.

    Raises:
        ApiError: 400, it is none that is served.
    """
    kind = item.get("type", "message")
    found = KINDS.get(kind) if isinstance(kind, str) else None
    if found is None:
        reason = NOT_STORED if kind == "item_reference" else f"there are {', '.join(KINDS)}"
        raise invalid(
            f"{where}.type is {str(kind)[:80]!r}, which is not served: {reason}",
            f"{where}.type",
            "unsupported_item",
        )
    try:
        return msgspec.convert(without_nulls(item), found)
    except msgspec.ValidationError as error:
        raise below(validation_error(str(error), found), where) from None
    except RecursionError:
        raise invalid(f"{where} is nested too deeply", where, "invalid_json") from None


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that hold null, here and in the parts within."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value


def below(error: ApiError, where: str) -> ApiError:
    """Return an error of an item as one of the request."""
    path = f"{where}.{error.param}" if error.param else where
    message = error.message.removeprefix(error.param or "the body").removeprefix(":")
    return invalid(f"{path}{':' if error.param else ''} {message.strip()}", path, error.code)


def add(turns: Turns, item: msgspec.Struct, where: str) -> None:
    """Add an item to the conversation.

    Raises:
        ApiError: 400, it cannot stand where it does.
    """
    match item:
        case InputMessage(role, content):
            text = plain(content, f"{where}.content")
            turns.message("system" if role == "developer" else role, text)
        case FunctionCall():
            turns.call(item)
        case FunctionCallOutput(_, call_id, output):
            if call_id not in turns.calls:
                raise invalid(
                    f"{where}.call_id: no function_call {call_id[:80]!r} comes before it; {NOT_STORED}",
                    f"{where}.call_id",
                )
            turns.output(call_id, plain(output, f"{where}.output"))
        case ReasoningItem():
            texts = item.content or item.summary
            if texts:
                turns.reasoning("\n".join(part.text for part in texts))
        case _:
            raise TypeError(f"{type(item)} is no item")


def plain(content: str | list[Part], where: str) -> str:
    """Return content as text.

    Raises:
        ApiError: 400 for a part that is no text.
    """
    if isinstance(content, str):
        return content
    return "\n".join([part_text(part, f"{where}[{index}]") for index, part in enumerate(content)])


def part_text(part: Part, where: str) -> str:
    """Return a part's text.

    Raises:
        ApiError: 400, it has none.
    """
    if part.type not in ("input_text", "output_text", "text", "refusal"):
        extra = "the model reads text only" if part.type in UNSERVED_PARTS else "only text is served"
        raise invalid(f"{where}.type is {part.type[:80]!r}; {extra}", f"{where}.type", "unsupported_content")
    name = "refusal" if part.type == "refusal" else "text"
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise invalid(f"{where}.{name} is required", f"{where}.{name}", "missing_field")
    return text
