# SPDX-License-Identifier: Apache-2.0
"""Inputs of requests for vectors and labels: texts, token ids or a conversation."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from starlette.types import Scope

from mizzen.core.sampling_params import SamplingParams
from mizzen.gateway.errors import invalid
from mizzen.gateway.fields.decoder import BodyDecoder
from mizzen.gateway.fields.rules import UNUSED, Rules
from mizzen.gateway.openai.messages import Message, template_messages
from mizzen.gateway.openai.output_form import ChatOutputForm, FamilyOptions
from mizzen.gateway.openai.parse import check_template_kwargs, parse_prompts
from mizzen.gateway.openai.schemas import PROMPTS, Priority, doc
from mizzen.gateway.requests.generation_request import GenerationRequest, Prompt, PromptSource
from mizzen.gateway.requests.text_batch import BatchedText, TextBatch, TruncatedTokens, check_truncation
from mizzen.gateway.telemetry.request_record import get_record

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

RULES: Rules = {"user": UNUSED}
MAX_INPUTS = 2048
MAX_JOINED_LENGTH = 16 * 1024 * 1024
"""Maximum product of the length of a text (in characters) or of token ids that begins several prompts of a
request, and the number of these prompts."""
ONE_PASS = SamplingParams(temperature=0.0, max_tokens=1)
"""Sampling parameters of requests that generate nothing."""

R = TypeVar("R", bound="PooledInput")


class PooledInput(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that requests for vectors and labels share."""

    model: Annotated[str, doc("A name listed in `/v1/models`; any other name gets 404.")]
    input: Annotated[
        str | list[Any] | None,
        Meta(
            description="Text, token ids, or a list of up to 2,048 of either; each gets one result.",
            extra_json_schema={"anyOf": PROMPTS},
        ),
    ] = None
    messages: Annotated[
        list[Message] | None,
        doc("A conversation instead of `input`, rendered by the chat template; it gets one result."),
    ] = None
    add_generation_prompt: Annotated[
        bool | None, doc("With `messages`: whether the prompt opens the assistant's turn (default: false).")
    ] = None
    continue_final_message: Annotated[
        bool | None, doc("With `messages`: leave the last message open (default: false).")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, doc("With `messages`: variables for the chat template.")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        doc(
            "Cut each prompt at its end to this number of tokens; -1 means the context length. By default, "
            "a prompt that is too long gets 400."
        ),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        doc(
            "Add the tokenizer's special tokens, such as BOS (default: true with `input`, false with "
            "`messages`)."
        ),
    ] = None
    priority: Annotated[Priority | None, doc("As in chat completions.")] = None
    user: Annotated[str | None, doc("Accepted, not used.")] = None


class InputReader(Generic[R]):
    """Reads bodies of one type of request."""

    def __init__(self, gateway: Gateway, families: FamilyOptions, kind: type[R]) -> None:
        self._gateway = gateway
        self._families = families
        self._decoder = BodyDecoder(kind, RULES, strict=gateway.config.strict_fields)

    async def read(self, body: bytes, scope: Scope) -> tuple[R, list[GenerationRequest]]:
        """Return the request in a body, and a generation request for each of its inputs.

        Raises:
            ApiError: 400 if the request is invalid.
        """
        request, generations = await self._gateway.body_reader.parse_body(body, self._parse, scope)
        get_record(scope).ignored_fields = generations[0].ignored_fields
        return request, generations

    def _parse(self, body: bytes) -> tuple[R, list[GenerationRequest]]:
        request, ignored = self._decoder.decode(body)
        return request, input_generations(request, ignored, self._families)


def input_generations(
    request: PooledInput, ignored: tuple[str, ...], families: FamilyOptions
) -> list[GenerationRequest]:
    """Return a generation request for each input of a request; `ignored` lists the body's ignored fields.

    Raises:
        ApiError: 400 if there is not exactly one of `input` and `messages`, or if an input is invalid; the
            error names the input by its index.
    """
    check_truncation(request.truncate_prompt_tokens)
    if (request.input is None) == (request.messages is None):
        code = "missing_field" if request.input is None else None
        raise invalid("give either input or messages", "input", code)
    if request.messages is not None:
        return [conversation_generation(request, request.messages, ignored, families)]
    for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(request, name) is not None:
            raise invalid(f"{name} needs messages", name)
    value = request.input or ()
    many = isinstance(value, list) and bool(value) and isinstance(value[0], (str, list))
    if many and len(value) > MAX_INPUTS:
        text = f"input holds {len(value)} texts; at most {MAX_INPUTS} are allowed"
        raise invalid(text, "input", "out_of_range")
    return prompt_generations(
        request.model,
        parse_prompts(request.input or "", "input"),
        "input" if not many else "input[{}]",
        add_special_tokens=request.add_special_tokens is not False,
        truncate=request.truncate_prompt_tokens,
        priority=request.priority,
        ignored=ignored,
    )


def prompt_generations(
    model: str,
    prompts: Sequence[Prompt],
    field: str,
    *,
    add_special_tokens: bool = True,
    truncate: int | None = None,
    priority: int | None = None,
    ignored: tuple[str, ...] = (),
) -> list[GenerationRequest]:
    """Return a generation request for each prompt; all texts among them are tokenized together.

    Args:
        model: name of the model.
        prompts: texts or token ids.
        field: path of the field that holds a prompt; `{}` stands for the prompt's index.
        add_special_tokens: whether the tokenizer adds its own special tokens to texts.
        truncate: number of tokens to which each prompt is cut, as in `truncate_prompt_tokens`.
        priority: the requested priority.
        ignored: paths of the body's ignored fields.
    """
    texts = [prompt if isinstance(prompt, str) else "" for prompt in prompts]
    batch = TextBatch(texts, add_special_tokens, truncate)

    def source(index: int, prompt: Prompt) -> PromptSource | None:
        if isinstance(prompt, array):
            ids = np.frombuffer(prompt, np.int32)
            return None if truncate is None else TruncatedTokens(ids, truncate)
        return BatchedText(batch, index)

    return [
        GenerationRequest(
            model=model,
            prompt=prompt,
            prompt_source=source(index, prompt),
            prompt_field=field.format(index),
            ignored_fields=ignored,
            priority=priority,
            add_special_tokens=add_special_tokens,
            sampling=ONE_PASS,
        )
        for index, prompt in enumerate(prompts)
    ]


def conversation_generation(
    request: PooledInput, messages: list[Message], ignored: tuple[str, ...], families: FamilyOptions
) -> GenerationRequest:
    """Return the generation request for a conversation.

    Raises:
        ApiError: 400 if a message or option is invalid.
    """
    opens, continues = bool(request.add_generation_prompt), bool(request.continue_final_message)
    if opens and continues:
        name = "continue_final_message"
        raise invalid(f"{name} cannot be combined with add_generation_prompt: true", name)
    return GenerationRequest(
        model=request.model,
        messages=tuple(template_messages(messages)),
        template_arguments=check_template_kwargs(request.chat_template_kwargs),
        add_generation_prompt=opens,
        continue_final_message=continues,
        add_special_tokens=bool(request.add_special_tokens),
        output_form=ChatOutputForm(tools=None, options=families),
        prompt_field="messages",
        truncate=request.truncate_prompt_tokens,
        ignored_fields=ignored,
        priority=request.priority,
        sampling=ONE_PASS,
    )
