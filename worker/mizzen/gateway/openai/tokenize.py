"""POST /tokenize and /detokenize: text to token ids and back, as completions would see them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.types import Scope

from mizzen.core.sampling_params import SamplingParams
from mizzen.gateway.errors import invalid, unavailable
from mizzen.gateway.openai.decode_body import decode
from mizzen.gateway.openai.messages import Message, conversation
from mizzen.gateway.openai.output_form import ChatForm, FamilyOptions
from mizzen.gateway.openai.parse import check_arguments, opens_turn
from mizzen.gateway.openai.schemas import TokenId, doc
from mizzen.gateway.requests.engine_request import tokenize_prompt
from mizzen.gateway.requests.fan_out import map_concurrently
from mizzen.gateway.requests.generation_request import MAX_SEQUENCES, GenerationRequest
from mizzen.gateway.services import Service
from mizzen.gateway.text.model import TextModel
from mizzen.gateway.tools.tool_choice import chosen
from mizzen.gateway.tools.tool_schemas import Tool

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

MANY_TOKENS = 4096
"""More are decoded off the event loop."""
NOTHING = SamplingParams(temperature=0.0, max_tokens=1)


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /tokenize: `prompt` or `messages`."""

    model: Annotated[str | None, doc("A name listed in `/v1/models`; by default the first.")] = None
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
    return_token_strs: Annotated[bool | None, doc("Add `token_strs`, the text of each token.")] = None


class TokenizeResponse(msgspec.Struct):
    """Response of POST /tokenize; of several texts, lists."""

    count: int | list[int]
    max_model_len: Annotated[int, Meta(description="The context length.")]
    tokens: list[int | list[int]]
    token_strs: list[str | list[str]] | UnsetType = UNSET


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /detokenize."""

    model: Annotated[str | None, doc("A name listed in `/v1/models`; by default the first.")] = None
    tokens: Annotated[list[TokenId], doc("Token ids; ids unknown to the tokenizer produce no text.")]
    skip_special_tokens: Annotated[
        bool | None, doc("Leave special tokens out of the text (default: false).")
    ] = None


class DetokenizeResponse(msgspec.Struct):
    """Response of POST /detokenize."""

    prompt: str
    text: Annotated[str, Meta(description="The same text, under SGLang's name.")]


class Texts:
    """Answers requests that need a tokenizer and no engine's step."""

    def __init__(self, gateway: Gateway, families: FamilyOptions) -> None:
        self._gateway = gateway
        self._families = families
        self._tokenize = msgspec.json.Decoder(TokenizeRequest)
        self._detokenize = msgspec.json.Decoder(DetokenizeRequest)

    async def tokenize(self, body: bytes, scope: Scope) -> TokenizeResponse:
        """Return the token ids of a text or a conversation.

        Raises:
            ApiError: the request is wrong, or no engine is there to say how its model tokenizes.
        """
        request, asked = await self._gateway.body_reader.parse_body(body, self._read, scope)
        service, text = self._model(request.model, scope)

        async def one(generation: GenerationRequest) -> list[int]:
            return (await tokenize_prompt(generation, text)).tolist()

        found = await map_concurrently(asked, one, at_once=1)
        context = service.table.longest_context(text)
        several = isinstance(request.prompt, list)
        counts = [len(ids) for ids in found]
        response = TokenizeResponse(counts if several else counts[0], context, [])
        response.tokens = [*found] if several else [*found[0]]
        if request.return_token_strs:
            names = [await asyncio.to_thread(token_texts, text, ids) for ids in found]
            response.token_strs = [*names] if several else [*names[0]]
        return response

    async def detokenize(self, body: bytes, scope: Scope) -> DetokenizeResponse:
        """Return the text of token ids.

        Raises:
            ApiError: as `tokenize`.
        """
        request = await self._gateway.body_reader.parse_body(body, partial(decode, self._detokenize), scope)
        _, text = self._model(request.model, scope)
        work = partial(text.tokenizer.decode, request.tokens, bool(request.skip_special_tokens))
        found = await asyncio.to_thread(work) if len(request.tokens) > MANY_TOKENS else work()
        return DetokenizeResponse(found, found)

    def _read(self, body: bytes) -> tuple[TokenizeRequest, list[GenerationRequest]]:
        request = decode(self._tokenize, body)
        if (request.prompt is None) == (request.messages is None):
            raise invalid("give either prompt or messages", "prompt")
        return request, generations(request, self._families)

    def _model(self, name: str | None, scope: Scope) -> tuple[Service, TextModel]:
        if name is None:
            names = [one for one, _ in self._gateway.models_for(scope)]
            if not names:
                raise unavailable("no model is served yet")
            name = names[0]
        service = self._gateway.open_service(name, scope)
        text = service.table.choose_text_model(None, ())
        if text is None:
            raise unavailable(service.table.unavailable_reason())
        return service, text


def generations(request: TokenizeRequest, families: FamilyOptions) -> list[GenerationRequest]:
    """Return what is to be tokenized, as generating requests would ask for it.

    Tools are named to the template whether or not the model could choose one of them.

    Raises:
        ApiError: 400, which names the field.
    """
    model = request.model or ""
    if request.messages is not None:
        arguments = check_arguments(request.chat_template_kwargs)
        tools = chosen(request.tools, None, None)
        if tools is not None:
            arguments["tools"] = tools.for_template()
        return [
            GenerationRequest(
                model=model,
                sampling=NOTHING,
                prompt_field="messages",
                messages=tuple(conversation(request.messages)),
                template_arguments=arguments,
                output_form=ChatForm(tools=None, options=families),
                add_generation_prompt=opens_turn(request),
                continue_final_message=bool(request.continue_final_message),
                add_special_tokens=bool(request.add_special_tokens),
            )
        ]
    for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(request, name) is not None:
            raise invalid(f"{name} needs messages", name)
    given = [request.prompt] if isinstance(request.prompt, str) else request.prompt or []
    if not 0 < len(given) <= MAX_SEQUENCES:
        raise invalid(f"prompt must hold 1 to {MAX_SEQUENCES} texts", "prompt")
    special = request.add_special_tokens is not False
    return [
        GenerationRequest(model=model, sampling=NOTHING, prompt=one, add_special_tokens=special)
        for one in given
    ]


def token_texts(text: TextModel, ids: list[int]) -> list[str]:
    """Return each token's text; a part of a character is U+FFFD."""
    return [text.tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
