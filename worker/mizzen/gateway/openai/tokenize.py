# SPDX-License-Identifier: Apache-2.0
"""POST /tokenize and /detokenize: convert text to token ids and back, as the generating endpoints do."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.types import Scope

from mizzen.core.sampling_params import SamplingParams
from mizzen.gateway.errors import invalid, unavailable
from mizzen.gateway.fields.decoder import BodyDecoder
from mizzen.gateway.fields.ignored import collect_paths
from mizzen.gateway.images.hold import hold_images
from mizzen.gateway.images.limits import ImageLimits, configured_limits
from mizzen.gateway.images.request_images import ImageCollector
from mizzen.gateway.openai.messages import Message, template_messages
from mizzen.gateway.openai.output_form import ChatOutputForm, FamilyOptions
from mizzen.gateway.openai.parse import check_template_kwargs, opens_assistant_turn, request_images
from mizzen.gateway.openai.schemas import ProcessorOptions, TokenId, doc
from mizzen.gateway.requests.engine_request import tokenize_prompt
from mizzen.gateway.requests.fan_out import map_concurrently
from mizzen.gateway.requests.generation_request import MAX_SEQUENCES, GenerationRequest
from mizzen.gateway.services import Service
from mizzen.gateway.telemetry.request_record import get_record
from mizzen.gateway.text.model import TextModel
from mizzen.gateway.tools.tool_choice import find_hosted_tools, parse_tools
from mizzen.gateway.tools.tool_schemas import Tool

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

OFF_LOOP_TOKENS = 4096
"""Number of tokens above which decoding runs in a thread instead of on the event loop."""
CHAT_OPTIONS = (
    "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "mm_processor_kwargs",
)  # fmt: skip
"""Fields of requests that apply only to `messages`."""
NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /tokenize: either `prompt` or `messages`."""

    model: Annotated[str | None, doc("A name listed in `/v1/models` (default: the first one).")] = None
    prompt: Annotated[str | list[str] | None, doc("A text, or up to 1,024 texts.")] = None
    messages: Annotated[list[Message] | None, doc("A chat, rendered by the chat template.")] = None
    tools: Annotated[list[Tool] | None, doc("With `messages`: passed to the template.")] = None
    add_special_tokens: Annotated[
        bool | None,
        doc(
            "Add the tokenizer's special tokens, such as BOS (default: true with `prompt`, "
            "false with `messages`)."
        ),
    ] = None
    add_generation_prompt: Annotated[bool | None, doc("As in chat completions.")] = None
    continue_final_message: Annotated[bool | None, doc("As in chat completions.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc("As in chat completions.")] = None
    mm_processor_kwargs: Annotated[ProcessorOptions | None, doc("As in chat completions.")] = None
    return_token_strs: Annotated[bool | None, doc("Add `token_strs`, the text of each token.")] = None


class TokenizeResponse(msgspec.Struct):
    """Response of POST /tokenize.

    If the request's `prompt` is a list of texts, all fields but `max_model_len` have one item per text.
    """

    count: int | list[int]
    max_model_len: Annotated[int, Meta(description="The context length in tokens.")]
    tokens: list[int | list[int]]
    token_strs: list[str | list[str]] | UnsetType = UNSET


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /detokenize."""

    model: Annotated[str | None, doc("A name listed in `/v1/models` (default: the first one).")] = None
    tokens: Annotated[list[TokenId], doc("Token ids; ids unknown to the tokenizer produce no text.")]
    skip_special_tokens: Annotated[
        bool | None, doc("Leave special tokens out of the text (default: false).")
    ] = None


class DetokenizeResponse(msgspec.Struct):
    """Response of POST /detokenize."""

    prompt: str
    text: Annotated[str, Meta(description="The same text as `prompt`, under SGLang's field name.")]


class TokenizeHandler:
    """Handler of POST /tokenize and /detokenize, which need a model's tokenizer but no engine."""

    def __init__(self, gateway: Gateway, families: FamilyOptions) -> None:
        self._gateway = gateway
        self._families = families
        self._image_limits = configured_limits(gateway.config)
        strict = gateway.config.strict_fields
        self._tokenize = BodyDecoder(TokenizeRequest, strict=strict)
        self._detokenize = BodyDecoder(DetokenizeRequest, strict=strict)

    async def tokenize(self, body: bytes, scope: Scope) -> TokenizeResponse:
        """Return the token ids of text or of a conversation.

        Raises:
            ApiError: the request is invalid, or no engine has announced the model's tokenizer.
        """
        parsed = await self._gateway.body_reader.parse_body(body, self._parse_tokenize, scope)
        request, requests, get_record(scope).ignored_fields = parsed
        service, text = find_text_model(self._gateway, request.model, scope)

        async def tokenize_one(generation: GenerationRequest) -> list[int]:
            with hold_images(self._gateway, generation, scope):
                return (await tokenize_prompt(generation, text)).ids.tolist()

        token_ids = await map_concurrently(requests, tokenize_one, concurrency=1)
        context = service.table.longest_context(text)
        is_batch = isinstance(request.prompt, list)
        counts = [len(ids) for ids in token_ids]
        response = TokenizeResponse(counts if is_batch else counts[0], context, [])
        response.tokens = [*token_ids] if is_batch else [*token_ids[0]]
        if request.return_token_strs:
            strings = [await asyncio.to_thread(token_strings, text, ids) for ids in token_ids]
            response.token_strs = [*strings] if is_batch else [*strings[0]]
        return response

    async def detokenize(self, body: bytes, scope: Scope) -> DetokenizeResponse:
        """Return the text of token ids.

        Raises:
            ApiError: the request is invalid, or no engine has announced the model's tokenizer.
        """
        request, get_record(scope).ignored_fields = await self._gateway.body_reader.parse_body(
            body, self._detokenize.decode, scope
        )
        _, text = find_text_model(self._gateway, request.model, scope)
        decode = partial(text.tokenizer.decode, request.tokens, bool(request.skip_special_tokens))
        decoded = await asyncio.to_thread(decode) if len(request.tokens) > OFF_LOOP_TOKENS else decode()
        return DetokenizeResponse(decoded, decoded)

    def _parse_tokenize(
        self, body: bytes
    ) -> tuple[TokenizeRequest, list[GenerationRequest], tuple[str, ...]]:
        request, ignored = self._tokenize.decode(body)
        hosted = find_hosted_tools(request.tools or (), strict=self._gateway.config.strict_fields)
        if (request.prompt is None) == (request.messages is None):
            raise invalid("give either prompt or messages", "prompt")
        return (
            request,
            tokenize_generations(request, self._families, self._image_limits),
            collect_paths(ignored, hosted),
        )


def find_text_model(gateway: Gateway, name: str | None, scope: Scope) -> tuple[Service, TextModel]:
    """Return the service of a model (None: the first one), and the model's tokenizer and chat template.

    Raises:
        ApiError: the model is unknown, or no engine has announced its tokenizer.
    """
    if name is None:
        names = [model_name for model_name, _ in gateway.models_for(scope)]
        if not names:
            raise unavailable("no model is served yet")
        name = names[0]
    service = gateway.find_active_service(name, scope)
    text = service.table.choose_text_model(None, ())
    if text is None:
        raise unavailable(service.table.unavailable_reason())
    return service, text


def tokenize_generations(
    request: TokenizeRequest, families: FamilyOptions, image_limits: ImageLimits
) -> list[GenerationRequest]:
    """Return a generation request for each text or conversation to tokenize.

    Tools are passed to the chat template even if the model's tool call format is unknown.

    Raises:
        ApiError: 400 if a field is invalid or does not apply; the error names it.
    """
    model = request.model or ""
    if request.messages is not None:
        arguments = check_template_kwargs(request.chat_template_kwargs)
        tools = parse_tools(request.tools, None, None)
        if tools is not None:
            arguments["tools"] = tools.template_tools()
        collector = ImageCollector(image_limits)
        messages = tuple(template_messages(request.messages, collector))
        return [
            GenerationRequest(
                model=model,
                sampling=NO_SAMPLING,
                prompt_field="messages",
                messages=messages,
                images=request_images(collector, request.mm_processor_kwargs),
                template_arguments=arguments,
                output_form=ChatOutputForm(tools=None, options=families),
                add_generation_prompt=opens_assistant_turn(request),
                continue_final_message=bool(request.continue_final_message),
                add_special_tokens=bool(request.add_special_tokens),
            )
        ]
    for name in CHAT_OPTIONS:
        if getattr(request, name) is not None:
            raise invalid(f"{name} needs messages", name)
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt or []
    if not 0 < len(prompts) <= MAX_SEQUENCES:
        raise invalid(f"prompt must hold 1 to {MAX_SEQUENCES} texts", "prompt")
    add_special_tokens = request.add_special_tokens is not False
    return [
        GenerationRequest(
            model=model, sampling=NO_SAMPLING, prompt=prompt, add_special_tokens=add_special_tokens
        )
        for prompt in prompts
    ]


def token_strings(text: TextModel, ids: list[int]) -> list[str]:
    """Return the text of each token; U+FFFD replaces a part of a character."""
    return [text.tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
