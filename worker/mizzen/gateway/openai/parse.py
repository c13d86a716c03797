"""From request bodies to what is asked for."""

from __future__ import annotations

from array import array
from typing import Any, Protocol

import msgspec

from mizzen.gateway.errors import invalid
from mizzen.gateway.openai.decode_body import decode, refuse_unserved, whole
from mizzen.gateway.openai.messages import conversation
from mizzen.gateway.openai.output_form import FamilyOptions, output_form
from mizzen.gateway.openai.sampling_fields import sampling
from mizzen.gateway.openai.schemas import ChatRequest, Common, CompletionRequest, StreamOptions
from mizzen.gateway.openai.structured_output import grammar
from mizzen.gateway.requests.body_reader import split_pieces
from mizzen.gateway.requests.generation_request import MAX_SEQUENCES, GenerationRequest, Prompt
from mizzen.gateway.routing.session import bound_session

DEFAULT_COMPLETION_TOKENS = 16
DEFAULT_FAMILIES = FamilyOptions()
RESERVED_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")

HARMLESS: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default"),
    "store": (False,),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}
"""Fields that are not served: values (besides null) that ask for nothing."""
CHAT_HARMLESS = {
    **HARMLESS,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "echo": (False,),
}
COMPLETION_HARMLESS = {**HARMLESS, "suffix": ("",)}


class Parser:
    """Decodes the bodies of both endpoints."""

    def __init__(self, families: FamilyOptions = DEFAULT_FAMILIES) -> None:
        """Take names of families that go before what a model's template shows."""
        self._families = families
        self._chat = msgspec.json.Decoder(ChatRequest)
        self._completion = msgspec.json.Decoder(CompletionRequest)

    def chat(self, body: bytes) -> GenerationRequest:
        """Return what a chat request asks for.

        Raises:
            ApiError: 400, which names the field.
        """
        return self.chat_wish(decode(self._chat, body))

    def chat_wish(self, request: ChatRequest) -> GenerationRequest:
        """Return what a decoded chat request asks for.

        Raises:
            ApiError: 400, which names the field.
        """
        refuse_unserved(request, CHAT_HARMLESS)
        if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
            raise invalid(
                "max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens"
            )
        if request.top_logprobs and not request.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        opens = opens_turn(request)
        most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        field, made = grammar(request) or ("tools", None)
        return GenerationRequest(
            **common(request),
            messages=tuple(conversation(request.messages)),
            template_arguments=template_arguments(request),
            add_generation_prompt=opens,
            continue_final_message=bool(request.continue_final_message),
            output_form=output_form(request, self._families),
            prompt_field="messages",
            grammar_field=field,
            sampling=sampling(
                request,
                most,
                grammar=made,
                logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            ),
            max_tokens_given=most is not None,
            add_special_tokens=bool(request.add_special_tokens),
            best_of=request.n or 1,
        )

    def chat_or_completion(self, body: bytes) -> GenerationRequest:
        """Parse the body of a chat request, which has `messages`, or else of a completion request.

        Raises:
            ApiError: 400, which names the field.
        """
        try:
            fields = msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            text = f"the body must be that of a chat or completion request: {error}"
            raise invalid(text, code="invalid_json") from None
        return self.chat(body) if "messages" in fields else self.completion(body)

    def completion(self, body: bytes) -> GenerationRequest:
        """Return what a completion request asks for; `max_tokens` is 16 by default, as in OpenAI's API.

        Raises:
            ApiError: 400, which names the field.
        """
        request = decode(self._completion, body)
        refuse_unserved(request, COMPLETION_HARMLESS)
        found = prompts(request.prompt)
        n = request.n or 1
        best_of = request.best_of or n
        if best_of < n:
            raise invalid(f"best_of must be at least n ({n}), not {best_of}", "best_of", "out_of_range")
        if best_of > n and request.stream:
            raise invalid("best_of cannot be streamed: the best is known at the end", "best_of")
        if len(found) * best_of > MAX_SEQUENCES:
            raise invalid(
                f"{len(found)} prompts times {best_of} are more than {MAX_SEQUENCES} sequences; send several"
                " requests",
                "prompt" if best_of == 1 else "best_of" if request.best_of else "n",
                "out_of_range",
            )
        if request.logprobs is True:
            raise invalid("logprobs must be a number here; booleans are chat's", "logprobs", "invalid_type")
        logprobs = None if request.logprobs is False else request.logprobs
        most = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        field, made = grammar(request) or ("", None)
        return GenerationRequest(
            **common(request),
            grammar_field=field,
            prompt=found[0],
            prompts=found,
            sampling=sampling(
                request,
                max(1, most),
                grammar=made,
                logprobs=logprobs,
                prompt_logprobs=logprobs if request.echo else None,
            ),
            max_tokens_given=bool(request.max_tokens),
            prompt_only=most == 0,
            add_special_tokens=request.add_special_tokens is not False,
            echo=bool(request.echo),
            best_of=best_of,
        )


def common(request: Common) -> dict[str, Any]:
    """Return what both endpoints ask for alike, as fields of `Wish`.

    Raises:
        ApiError: 400, which names the field.
    """
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is allowed only when stream is true", "stream_options")
    options = request.stream_options or StreamOptions()
    return {
        "model": request.model,
        "n": request.n or 1,
        "priority": request.priority,
        "session": bound_session(getattr(request, "prompt_cache_key", None) or request.user or ""),
        "timeout_seconds": request.timeout,
        "stream": bool(request.stream),
        "include_usage": bool(options.include_usage),
        "continuous_usage": bool(options.include_usage and options.continuous_usage_stats),
        "return_token_ids": bool(request.return_token_ids),
        "tokens_as_ids": bool(request.return_tokens_as_token_ids),
        "skip_special_tokens": request.skip_special_tokens is not False,
    }


def template_arguments(request: ChatRequest) -> dict[str, Any]:
    """Return the variables that a request gives to the chat template.

    Raises:
        ApiError: 400 for one that the gateway itself sets.
    """
    found = check_arguments(request.chat_template_kwargs)
    if request.reasoning_effort is not None:
        found.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            found.setdefault("enable_thinking", False)
    return found


def check_arguments(given: dict[str, Any] | None) -> dict[str, Any]:
    """Return a copy of `chat_template_kwargs`.

    Raises:
        ApiError: 400 for one that the gateway itself sets.
    """
    for name in RESERVED_ARGUMENTS:
        if given and name in given:
            where = f"chat_template_kwargs.{name}"
            raise invalid(f"{where} is no variable of the template; it is a field of the request", where)
    return dict(given or {})


class OpensTurn(Protocol):
    """A request with a conversation."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None


def opens_turn(request: OpensTurn) -> bool:
    """Return whether a conversation's prompt opens the assistant's turn.

    Raises:
        ApiError: 400 when it shall, and continue the last message too.
    """
    continues = bool(request.continue_final_message)
    opens = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    if continues and opens:
        raise invalid("continue_final_message needs add_generation_prompt: false", "continue_final_message")
    return opens


def prompts(given: str | list[Any], name: str = "prompt") -> tuple[Prompt, ...]:
    """Return the prompts of a body's field, each a text or token ids.

    Raises:
        ApiError: 400 for an empty one, or something else.
    """
    if isinstance(given, str):
        return (given,)
    if not given:
        raise invalid(f"{name} is empty; give text or token ids", name)
    if all(isinstance(one, (str, list)) for one in given):
        return tuple(one if isinstance(one, str) else token_ids(one, name) for one in given)
    return (token_ids(given, name),)


def token_ids(given: list[Any], name: str) -> array[int]:
    """Return token ids of a body's field, int32.

    Raises:
        ApiError: 400 when they are none.
    """
    if not given:
        raise invalid(f"{name} is empty; give text or token ids", name)
    found = array("i")
    for piece in split_pieces(given):
        kinds = set(map(type, piece))
        if kinds != {int} and kinds <= {int, float}:
            piece = [whole(one) for one in piece]
            kinds = set(map(type, piece))
        if kinds != {int}:
            text = f"{name} must be text, a list of token ids, or a list of either"
            raise invalid(text, name, "invalid_type")
        if min(piece) < 0 or max(piece) >= 2**31:
            raise invalid(f"{name} holds a token id outside 0..2147483647", name, "out_of_range")
        found.extend(piece)
    return found
