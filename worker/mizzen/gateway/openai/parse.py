"""From request bodies to what is asked for; everything that is wrong with a body is named here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from mizzen.core.params import SamplingParams
from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.openai.schemas import ChatRequest, Common, CompletionRequest, Message, StreamOptions

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 1024

HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "suffix": ("",),
    "echo": (False,),
}
"""Fields that are not served: values (besides null) that ask for nothing."""

MESSAGE_HARMLESS: dict[str, tuple[Any, ...]] = {"tool_calls": ([],), "annotations": ([],), "refusal": ("",)}
KNOWN_ROLES = ("tool", "function")

R = TypeVar("R", bound=Common)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a request asks for, whatever its endpoint."""

    model: str
    messages: tuple[dict[str, Any], ...] | None
    """A conversation, or None with `prompt`."""
    prompt: str | tuple[int, ...] | None
    sampling: SamplingParams
    max_tokens_given: bool
    """Whether `sampling.max_tokens` is the client's: the context must then have room for it."""
    stream: bool
    include_usage: bool
    return_token_ids: bool


class Parser:
    """Decodes the bodies of both endpoints."""

    def __init__(self) -> None:
        self._chat = msgspec.json.Decoder(ChatRequest)
        self._completion = msgspec.json.Decoder(CompletionRequest)

    def chat(self, body: bytes) -> Wish:
        """Return what a chat request asks for.

        Raises:
            ApiError: 400, which names the field.
        """
        request = decode(self._chat, body)
        refuse_unserved(request, HARMLESS)
        if not request.messages:
            raise invalid("messages must hold at least one message", "messages")
        if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
            raise invalid(
                "max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens"
            )
        most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        messages = tuple(conversation(request.messages))
        return wish(request, most, messages=messages, prompt=None)

    def completion(self, body: bytes) -> Wish:
        """Return what a completion request asks for; `max_tokens` is 16 by default, as in OpenAI's API.

        Raises:
            ApiError: 400, which names the field.
        """
        request = decode(self._completion, body)
        refuse_unserved(request, HARMLESS)
        most = 16 if request.max_tokens is None else request.max_tokens
        return wish(request, most, messages=None, prompt=prompt(request.prompt))


def decode(decoder: msgspec.json.Decoder[R], body: bytes) -> R:
    """Return the request in a body.

    Raises:
        ApiError: 400, which names the field and what is wrong with it.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None


def validation_error(text: str) -> ApiError:
    """Return the 400 of a message of msgspec, such as "Expected `int`, got `str` - at `$.seed`"."""
    reason, _, path = text.partition(" - at `")
    path = path.rstrip("`").removeprefix("$").removeprefix(".")
    field = re.search(r"(unknown|required) field `([^`]*)`", reason)
    if field:
        name = f"{path}.{field[2]}" if path else field[2]
        if field[1] == "unknown":
            return invalid(f"{name} is not a field that is served here", name, "unknown_field")
        return invalid(f"{name} is required", name, "missing_field")
    if not path:
        return invalid(f"the body must be a JSON object: {reason}", code="invalid_type")
    reason = reason[0].lower() + reason[1:]
    if path.endswith(".role"):
        reason += "; it must be system, developer, user or assistant (tool is not served yet)"
    if path.endswith(".type") and ".content[" in path:
        reason += "; only parts of type text are served"
    return invalid(f"{path}: {reason}", path, "invalid_type")


def refuse_unserved(request: msgspec.Struct, harmless: dict[str, tuple[Any, ...]], where: str = "") -> None:
    """Raise when a known field that is not served asks for something.

    Raises:
        ApiError: 400 with the field's name.
    """
    for field in msgspec.structs.fields(request):
        value = getattr(request, field.name)
        if value is None or (field.type is not Any and field.name not in harmless):
            continue
        if not any(value == good and same_kind(value, good) for good in harmless.get(field.name, ())):
            name = where + field.name
            raise invalid(f"{name} is not served yet (leave it out)", name, "unsupported_parameter")


def same_kind(value: object, other: object) -> bool:
    """Tell whether both are booleans or neither is: in Python, 0 equals False."""
    return isinstance(value, bool) == isinstance(other, bool)


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as templates want them: text parts joined by line breaks, `developer` as `system`.

    Raises:
        ApiError: 400 for a message without content.
    """
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]."
        refuse_unserved(message, MESSAGE_HARMLESS, where)
        content = message.content
        if content is None:
            raise invalid(f"{where}content is required", f"{where}content", "missing_field")
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        entry: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": content,
        }
        for name in ("name", "reasoning_content", "reasoning"):
            if getattr(message, name) is not None:
                entry[name] = getattr(message, name)
        plain.append(entry)
    return plain


def prompt(given: str | list[Any]) -> str | tuple[int, ...]:
    """Return a completion's prompt: text, or token ids. A list of one prompt is that prompt.

    Raises:
        ApiError: 400 for several prompts, an empty one, or something else.
    """
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], (str, list)):
        given = given[0]
    if isinstance(given, str):
        return given
    if not given:
        raise invalid("prompt is empty; give text or token ids", "prompt")
    if all(type(token) is int for token in given):
        if not all(0 <= token < 2**31 for token in given):
            raise invalid("prompt holds a token id outside 0..2147483647", "prompt")
        return tuple(given)
    if all(isinstance(one, (str, list)) for one in given):
        raise invalid("prompt: several prompts in one request are not served yet", "prompt")
    raise invalid("prompt must be text or a list of token ids", "prompt", "invalid_type")


def wish(
    request: Common,
    max_tokens: int | None,
    *,
    messages: tuple[dict[str, Any], ...] | None,
    prompt: str | tuple[int, ...] | None,
) -> Wish:
    """Return what a decoded request asks for.

    Raises:
        ApiError: 400 for a value outside its range.
    """
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is allowed only when stream is true", "stream_options")
    options = request.stream_options or StreamOptions()
    return Wish(
        model=request.model,
        messages=messages,
        prompt=prompt,
        sampling=sampling(request, max_tokens),
        max_tokens_given=request.max_tokens is not None
        or getattr(request, "max_completion_tokens", None) is not None,
        stream=bool(request.stream),
        include_usage=bool(options.include_usage),
        return_token_ids=bool(request.return_token_ids),
    )


def sampling(request: Common, max_tokens: int | None) -> SamplingParams:
    """Return how tokens are chosen and when the answer ends.

    Raises:
        ApiError: 400 for a value outside its range.
    """
    for name, value, low, high in (
        ("temperature", request.temperature, 0, 2),
        ("top_k", request.top_k, -1, 2**31 - 1),
    ):
        if value is not None and not low <= value <= high:
            raise invalid(f"{name} must be between {low} and {high}, not {value}", name, "out_of_range")
    try:
        return SamplingParams(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_k=max(0, request.top_k or 0),
            top_p=1.0 if request.top_p is None else request.top_p,
            min_p=request.min_p or 0.0,
            seed=request.seed,
            max_tokens=max_tokens,
            ignore_eos=bool(request.ignore_eos),
            stop_token_ids=stop_tokens(request.stop_token_ids or []),
            stop=stops(request.stop),
        )
    except ValueError as error:
        raise invalid(str(error), str(error).partition(" ")[0], "out_of_range") from None


def stop_tokens(given: list[int]) -> tuple[int, ...]:
    """Return token ids that end an answer.

    Raises:
        ApiError: 400 for too many, or no token id.
    """
    if len(given) > MAX_STOP_TOKENS:
        raise invalid(f"stop_token_ids holds more than {MAX_STOP_TOKENS} ids", "stop_token_ids")
    if not all(0 <= token < 2**31 for token in given):
        raise invalid("stop_token_ids holds a token id outside 0..2147483647", "stop_token_ids")
    return tuple(given)


def stops(given: str | list[str] | None) -> tuple[str, ...]:
    """Return stop strings.

    Raises:
        ApiError: 400 for too many, an empty or a long one.
    """
    found = (given,) if isinstance(given, str) else tuple(given or ())
    if len(found) > MAX_STOPS:
        raise invalid(f"stop holds {len(found)} strings; at most {MAX_STOPS} are allowed", "stop")
    if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in found):
        raise invalid(f"each stop string must have 1 to {MAX_STOP_CHARACTERS} characters", "stop")
    return found
