# SPDX-License-Identifier: Apache-2.0
"""Register the endpoints of OpenAI's API and of Anthropic's Messages API, and some of vLLM and SGLang.

The gateway's application calls these functions once at startup.
"""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request, Response

from mizzen.gateway.anthropic.exchange import CountTokensHandler, MessagesExchange
from mizzen.gateway.anthropic.parse import MessagesParser
from mizzen.gateway.anthropic.response_bodies import CountTokensResponse, MessageResponse
from mizzen.gateway.anthropic.schemas import CountTokensRequest, MessagesRequest
from mizzen.gateway.error_shapes import MessagesErrorBody
from mizzen.gateway.errors import invalid
from mizzen.gateway.gateway import Gateway
from mizzen.gateway.http.api_call import JsonCall
from mizzen.gateway.openai.openapi_document import describe_operation, describe_response
from mizzen.gateway.openai.output_form import FamilyOptions
from mizzen.gateway.openai.parse import RequestParser
from mizzen.gateway.openai.response_bodies import ChatResponse, CompletionResponse
from mizzen.gateway.openai.response_writers import ChatWriter, CompletionWriter
from mizzen.gateway.openai.schemas import ChatRequest, CompletionRequest
from mizzen.gateway.openai.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeHandler,
    TokenizeRequest,
    TokenizeResponse,
    find_text_model,
)
from mizzen.gateway.requests.exchange import GenerationExchange
from mizzen.gateway.responses.exchange import ResponsesExchange, find_response, remove_response
from mizzen.gateway.responses.parse import ResponsesParser
from mizzen.gateway.responses.response_bodies import DeletedResponse, ResponsesResponse
from mizzen.gateway.responses.schemas import ResponsesRequest


def add_generation_endpoints(app: FastAPI, gateway: Gateway, parser: RequestParser) -> None:
    """Add the endpoints that generate text."""

    @app.post(
        "/v1/chat/completions", openapi_extra=describe_operation(ChatRequest, ChatResponse, stream=True)
    )
    async def chat_completions() -> Response:
        """Answer a conversation, streamed or in one response."""
        return GenerationExchange(gateway, parser.parse_chat, ChatWriter)

    @app.post(
        "/v1/completions",
        openapi_extra=describe_operation(CompletionRequest, CompletionResponse, stream=True),
    )
    async def completions() -> Response:
        """Continue text or token ids, streamed or in one response."""
        return GenerationExchange(gateway, parser.parse_completion, CompletionWriter)

    responses_parser = ResponsesParser(parser.chat_generation, strict_fields=parser.strict_fields)

    @app.post(
        "/v1/responses", openapi_extra=describe_operation(ResponsesRequest, ResponsesResponse, stream=True)
    )
    async def responses() -> Response:
        """Answer a conversation given as text or items, streamed or in one response."""
        return ResponsesExchange(gateway, responses_parser)

    @app.get("/v1/responses/{response_id}", openapi_extra=describe_response(ResponsesResponse))
    async def retrieve_response(response_id: str, request: Request) -> Response:
        """Return a stored response."""
        if request.query_params.get("stream", "").lower() == "true":
            raise invalid("stream: stored responses are not streamed", "stream", "unsupported_parameter")
        stored = find_response(gateway, request.scope, response_id)
        return Response(stored.body, media_type="application/json")

    @app.delete("/v1/responses/{response_id}", openapi_extra=describe_response(DeletedResponse))
    async def delete_response(response_id: str, request: Request) -> Response:
        """Delete a stored response."""
        remove_response(gateway, request.scope, response_id)
        return Response(msgspec.json.encode(DeletedResponse(response_id)), media_type="application/json")


def add_messages_endpoints(app: FastAPI, gateway: Gateway, parser: RequestParser) -> None:
    """Add the endpoints of Anthropic's Messages API."""
    messages_parser = MessagesParser(parser.chat_generation, strict_fields=parser.strict_fields)
    counter = CountTokensHandler(gateway, messages_parser)

    @app.post(
        "/v1/messages",
        openapi_extra=describe_operation(
            MessagesRequest, MessageResponse, stream=True, error=MessagesErrorBody
        ),
    )
    async def messages() -> Response:
        """Answer a conversation of content blocks, streamed or in one response."""
        return MessagesExchange(gateway, messages_parser)

    @app.post(
        "/v1/messages/count_tokens",
        openapi_extra=describe_operation(CountTokensRequest, CountTokensResponse, error=MessagesErrorBody),
    )
    async def count_tokens() -> Response:
        """Return the number of prompt tokens of a conversation of content blocks."""
        return JsonCall(gateway, counter.count_tokens)


def add_token_endpoints(app: FastAPI, gateway: Gateway, families: FamilyOptions) -> None:
    """Add the endpoints that tokenize and detokenize."""
    tokenizer = TokenizeHandler(gateway, families)

    @app.post("/v1/tokenize", openapi_extra=describe_operation(TokenizeRequest, TokenizeResponse))
    @app.post("/tokenize", openapi_extra=describe_operation(TokenizeRequest, TokenizeResponse))
    async def tokenize() -> Response:
        """Return the token ids of a text or a conversation."""
        return JsonCall(gateway, tokenizer.tokenize)

    @app.post("/v1/detokenize", openapi_extra=describe_operation(DetokenizeRequest, DetokenizeResponse))
    @app.post("/detokenize", openapi_extra=describe_operation(DetokenizeRequest, DetokenizeResponse))
    async def detokenize() -> Response:
        """Return the text of token ids."""
        return JsonCall(gateway, tokenizer.detokenize)

    if gateway.config.tokenizer_info:

        @app.get("/tokenizer_info")
        async def tokenizer_info(request: Request) -> Response:
            """Return the configuration of a model's tokenizer, with its chat template and special tokens."""
            _, text = find_text_model(gateway, request.query_params.get("model"), request.scope)
            return Response(msgspec.json.encode(text.description), media_type="application/json")
