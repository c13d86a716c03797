# SPDX-License-Identifier: Apache-2.0
"""Parse chat and completion bodies into `GenerationRequest`s.

All checks that do not depend on the model happen here; errors have status 400 and name the field.
"""

from __future__ import annotations

from array import array
from typing import Any, Protocol

import msgspec

from mizzen.gateway.errors import invalid
from mizzen.gateway.fields.decoder import BodyDecoder
from mizzen.gateway.fields.ignored import collect_paths
from mizzen.gateway.images.limits import ImageLimits
from mizzen.gateway.images.request_images import ImageCollector, RequestImages
from mizzen.gateway.openai.field_rules import CHAT_RULES, COMPLETION_RULES
from mizzen.gateway.openai.messages import template_messages
from mizzen.gateway.openai.output_form import FamilyOptions, chat_output_form
from mizzen.gateway.openai.sampling_fields import sampling_params
from mizzen.gateway.openai.schemas import (
    MAX_INT32,
    ChatRequest,
    CommonFields,
    CompletionRequest,
    ProcessorOptions,
    StreamOptions,
)
from mizzen.gateway.openai.structured_output import request_grammar
from mizzen.gateway.requests.body_reader import split_pieces
from mizzen.gateway.requests.decode_body import to_integer
from mizzen.gateway.requests.generation_request import MAX_SEQUENCES, GenerationRequest, Prompt
from mizzen.gateway.routing.session import bound_session
from mizzen.gateway.tools.tool_choice import find_hosted_tools
from mizzen.images.types import PixelLimits

DEFAULT_COMPLETION_TOKENS = 16
DEFAULT_FAMILIES = FamilyOptions()
DEFAULT_IMAGE_LIMITS = ImageLimits()
RESERVED_TEMPLATE_KWARGS = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
)


class RequestParser:
    """Parser of chat and completion bodies."""

    def __init__(
        self,
        families: FamilyOptions = DEFAULT_FAMILIES,
        *,
        strict_fields: bool = False,
        image_limits: ImageLimits = DEFAULT_IMAGE_LIMITS,
    ) -> None:
        """Create a parser.

        Args:
            families: The tool and reasoning families; names other than "auto" turn off detection by template.
            strict_fields: True to reject unknown fields, and fields that only advise.
            image_limits: Limits of the images of a request.
        """
        self._image_limits = image_limits
        self._families = families
        self.strict_fields = strict_fields
        self._chat = BodyDecoder(ChatRequest, CHAT_RULES, strict=strict_fields)
        self._completion = BodyDecoder(CompletionRequest, COMPLETION_RULES, strict=strict_fields)

    def parse_chat(self, body: bytes) -> GenerationRequest:
        """Parse the body of a chat request.

        Raises:
            ApiError: 400 if a field is invalid or not supported; the error names it.
        """
        return self.chat_generation(*self._chat.decode(body))

    def chat_generation(self, request: ChatRequest, ignored: tuple[str, ...] = ()) -> GenerationRequest:
        """Convert a decoded chat request to a `GenerationRequest`; `ignored` lists the body's ignored fields.

        Raises:
            ApiError: 400 if a field is invalid or not supported; the error names it.
        """
        if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
            raise invalid(
                "max_tokens and max_completion_tokens differ; set only one of them", "max_completion_tokens"
            )
        if request.top_logprobs and not request.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        hosted = find_hosted_tools(request.tools or (), strict=self.strict_fields)
        opens = opens_assistant_turn(request)
        max_tokens = (
            request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        )
        field, grammar = request_grammar(request) or ("tools", None)
        collector = ImageCollector(self._image_limits)
        messages = tuple(template_messages(request.messages, collector))
        return GenerationRequest(
            **common_fields(request),
            ignored_fields=collect_paths(ignored, hosted),
            messages=messages,
            images=request_images(collector, request.mm_processor_kwargs),
            template_arguments=template_arguments(request),
            add_generation_prompt=opens,
            continue_final_message=bool(request.continue_final_message),
            output_form=chat_output_form(request, self._families),
            prompt_field="messages",
            grammar_field=field,
            sampling=sampling_params(
                request,
                max_tokens,
                grammar=grammar,
                logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            ),
            max_tokens_given=max_tokens is not None,
            add_special_tokens=bool(request.add_special_tokens),
            best_of=request.n or 1,
        )

    def parse_chat_or_completion(self, body: bytes) -> GenerationRequest:
        """Parse the body of a chat request (with `messages`) or of a completion request.

        Raises:
            ApiError: 400 if a field is invalid or not supported; the error names it.
        """
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            text = f"the body must be a chat or completion request: {error}"
            raise invalid(text, code="invalid_json") from None
        return self.parse_chat(body) if "messages" in fields else self.parse_completion(body)

    def parse_completion(self, body: bytes) -> GenerationRequest:
        """Parse the body of a completion request; `max_tokens` defaults to 16, as in OpenAI's API.

        Raises:
            ApiError: 400 if a field is invalid or not supported; the error names it.
        """
        request, ignored = self._completion.decode(body)
        prompts = parse_prompts(request.prompt)
        n = request.n or 1
        best_of = request.best_of or n
        if best_of < n:
            raise invalid(f"best_of must be at least n ({n}), not {best_of}", "best_of", "out_of_range")
        if best_of > n and request.stream:
            raise invalid("best_of cannot be streamed: the best choices are known only at the end", "best_of")
        if len(prompts) * best_of > MAX_SEQUENCES:
            raise invalid(
                f"{len(prompts)} prompts times {best_of} make more than {MAX_SEQUENCES} sequences;"
                " send several requests",
                "prompt" if best_of == 1 else "best_of" if request.best_of else "n",
                "out_of_range",
            )
        if request.logprobs is True:
            raise invalid(
                "logprobs must be a number here; only chat takes booleans", "logprobs", "invalid_type"
            )
        logprobs = None if request.logprobs is False else request.logprobs
        if request.prompt_logprobs_from is not None and (logprobs is None or not request.echo):
            raise invalid("prompt_logprobs_from needs echo and logprobs", "prompt_logprobs_from")
        max_tokens = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        field, grammar = request_grammar(request) or ("", None)
        return GenerationRequest(
            **common_fields(request),
            ignored_fields=collect_paths(ignored),
            grammar_field=field,
            prompt=prompts[0],
            prompts=prompts,
            sampling=sampling_params(
                request,
                max(1, max_tokens),
                grammar=grammar,
                logprobs=logprobs,
                prompt_logprobs=logprobs if request.echo else None,
                prompt_logprobs_from=request.prompt_logprobs_from or 0,
            ),
            max_tokens_given=bool(request.max_tokens),
            prompt_only=max_tokens == 0,
            add_special_tokens=request.add_special_tokens is not False,
            echo=bool(request.echo),
            best_of=best_of,
        )


def request_images(collector: ImageCollector, options: ProcessorOptions | None) -> RequestImages | None:
    """Return the collected images of a request with its bounds on their pixels; None if there are no images.

    Raises:
        ApiError: 400 if the smallest number of pixels is larger than the largest.
    """
    pixels = None
    if options is not None and (options.min_pixels, options.max_pixels) != (None, None):
        pixels = PixelLimits(options.min_pixels, options.max_pixels)
        if (options.min_pixels or 0) > (options.max_pixels or MAX_INT32):
            field = "mm_processor_kwargs.min_pixels"
            raise invalid(f"{field} must be at most max_pixels", field, "out_of_range")
    return collector.finish(pixels)


def common_fields(request: CommonFields) -> dict[str, Any]:
    """Return the fields of `GenerationRequest` that are set the same way for chat and completion requests.

    Raises:
        ApiError: 400 if `stream_options` are set without `stream`.
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
    """Return the chat template variables of a request, including those derived from `reasoning_effort`.

    Raises:
        ApiError: 400 if `chat_template_kwargs` contains a variable that the gateway sets itself.
    """
    variables = check_template_kwargs(request.chat_template_kwargs)
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables


def check_template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return a copy of `chat_template_kwargs`; empty if the request has none.

    Raises:
        ApiError: 400 if it contains a variable that the gateway sets itself.
    """
    for name in RESERVED_TEMPLATE_KWARGS:
        if kwargs and name in kwargs:
            where = f"chat_template_kwargs.{name}"
            raise invalid(f"{where} is not a template variable; it is a field of the request", where)
    return dict(kwargs or {})


class TurnOptions(Protocol):
    """Fields of a conversation request that control how its prompt ends."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None


def opens_assistant_turn(request: TurnOptions) -> bool:
    """Return whether the prompt opens the assistant's turn.

    Raises:
        ApiError: 400 if both `add_generation_prompt` and `continue_final_message` are true.
    """
    continues = bool(request.continue_final_message)
    opens = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    if continues and opens:
        raise invalid("continue_final_message needs add_generation_prompt: false", "continue_final_message")
    return opens


def parse_prompts(value: str | list[Any], name: str = "prompt") -> tuple[Prompt, ...]:
    """Return the prompts in the value of field `name`, each as text or as token ids (int32).

    Raises:
        ApiError: 400 if the value is empty, or is neither text, nor token ids, nor a list of either.
    """
    if isinstance(value, str):
        return (value,)
    if not value:
        raise invalid(f"{name} is empty; give text or token ids", name)
    if all(isinstance(item, (str, list)) for item in value):
        return tuple(
            item if isinstance(item, str) else parse_token_ids(item, f"{name}[{index}]")
            for index, item in enumerate(value)
        )
    return (parse_token_ids(value, name),)


def parse_token_ids(values: list[Any], name: str) -> array[int]:
    """Return a list of token ids, from field `name`, as an int32 array.

    Raises:
        ApiError: 400 if the list is empty, or an item is not a token id.
    """
    if not values:
        raise invalid(f"{name} is empty; give text or token ids", name)
    ids = array("i")
    for piece in split_pieces(values):
        kinds = set(map(type, piece))
        if kinds != {int} and kinds <= {int, float}:
            piece = [to_integer(value) for value in piece]
            kinds = set(map(type, piece))
        if kinds != {int}:
            text = f"{name} must be text, a list of token ids, or a list of either"
            raise invalid(text, name, "invalid_type")
        if min(piece) < 0 or max(piece) >= 2**31:
            raise invalid(f"{name} holds a token id outside 0..2147483647", name, "out_of_range")
        ids.extend(piece)
    return ids
