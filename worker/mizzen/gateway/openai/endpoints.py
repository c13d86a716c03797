"""The OpenAI API's endpoints, and those of vLLM and SGLang that clients use beside them."""

from __future__ import annotations

from fastapi import FastAPI, Response

from mizzen.gateway.gateway import Gateway
from mizzen.gateway.openai.embeddings import EmbeddingRequest, EmbeddingResponse, Embeddings
from mizzen.gateway.openai.exchange import Exchange
from mizzen.gateway.openai.http_call import JsonCall
from mizzen.gateway.openai.openapi_document import described
from mizzen.gateway.openai.output_form import FamilyOptions
from mizzen.gateway.openai.parse import Parser
from mizzen.gateway.openai.response_bodies import ChatResponse, CompletionResponse
from mizzen.gateway.openai.response_writers import ChatWriter, CompletionWriter
from mizzen.gateway.openai.schemas import ChatRequest, CompletionRequest
from mizzen.gateway.openai.score import LabelsResponse, PairsResponse, ScoreRequest, Scores
from mizzen.gateway.openai.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    Texts,
    TokenizeRequest,
    TokenizeResponse,
)
from mizzen.gateway.responses.exchange import ResponsesExchange
from mizzen.gateway.responses.parse import ResponsesParser
from mizzen.gateway.responses.response_bodies import ResponsesResponse
from mizzen.gateway.responses.schemas import ResponsesRequest


def add_generation(app: FastAPI, gateway: Gateway, parser: Parser) -> None:
    """Add the endpoints that generate text."""

    @app.post("/v1/chat/completions", openapi_extra=described(ChatRequest, ChatResponse, stream=True))
    async def chat_completions() -> Response:
        """Answer a conversation, streamed or whole."""
        return Exchange(gateway, parser.chat, ChatWriter)

    @app.post("/v1/completions", openapi_extra=described(CompletionRequest, CompletionResponse, stream=True))
    async def completions() -> Response:
        """Continue a text or token ids, streamed or whole."""
        return Exchange(gateway, parser.completion, CompletionWriter)

    responses_parser = ResponsesParser(parser.chat_wish)

    @app.post("/v1/responses", openapi_extra=described(ResponsesRequest, ResponsesResponse, stream=True))
    async def responses() -> Response:
        """Answer a conversation of items, streamed or whole."""
        return ResponsesExchange(gateway, responses_parser)


def add_vectors(app: FastAPI, gateway: Gateway) -> None:
    """Add the endpoints for embeddings and scores."""
    embeddings, scores = Embeddings(gateway), Scores(gateway)

    @app.post("/v1/embeddings", openapi_extra=described(EmbeddingRequest, EmbeddingResponse))
    async def embed() -> Response:
        """Return a vector for each input."""
        return JsonCall(gateway, embeddings)

    @app.post("/v1/score", openapi_extra=described(ScoreRequest, PairsResponse, LabelsResponse))
    async def score() -> Response:
        """Return how near texts are, or how probable labels come next."""
        return JsonCall(gateway, scores)


def add_texts(app: FastAPI, gateway: Gateway, families: FamilyOptions) -> None:
    """Add the endpoints for tokens."""
    texts = Texts(gateway, families)

    @app.post("/v1/tokenize", openapi_extra=described(TokenizeRequest, TokenizeResponse))
    @app.post("/tokenize", openapi_extra=described(TokenizeRequest, TokenizeResponse))
    async def tokenize() -> Response:
        """Return the token ids of a text or a conversation."""
        return JsonCall(gateway, texts.tokenize)

    @app.post("/v1/detokenize", openapi_extra=described(DetokenizeRequest, DetokenizeResponse))
    @app.post("/detokenize", openapi_extra=described(DetokenizeRequest, DetokenizeResponse))
    async def detokenize() -> Response:
        """Return the text of token ids."""
        return JsonCall(gateway, texts.detokenize)
