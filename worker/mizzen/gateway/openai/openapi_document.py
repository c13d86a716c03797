# SPDX-License-Identifier: Apache-2.0
"""The gateway's OpenAPI document.

FastAPI does not parse the bodies, so their schemas come from the msgspec structs.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from mizzen.gateway.anthropic.response_bodies import CountTokensResponse, MessageResponse
from mizzen.gateway.anthropic.schemas import (
    CountTokensRequest,
    CustomTool,
    ImageBlock,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from mizzen.gateway.error_shapes import OVERLOADED_STATUS, MessagesErrorBody
from mizzen.gateway.openai.response_bodies import ChatResponse, CompletionResponse, Model, ModelList
from mizzen.gateway.openai.schemas import ChatRequest, CompletionRequest
from mizzen.gateway.openai.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from mizzen.gateway.pooling.classify import ClassifyRequest, ClassifyResponse
from mizzen.gateway.pooling.cohere_embed import CohereEmbedRequest, CohereEmbedResponse
from mizzen.gateway.pooling.embeddings import EmbeddingRequest, EmbeddingResponse
from mizzen.gateway.pooling.moderations import ModerationRequest, ModerationResponse
from mizzen.gateway.pooling.pooling_call import PoolingRequest, PoolingResponse
from mizzen.gateway.pooling.rerank import RerankRequest, RerankResponse
from mizzen.gateway.pooling.score import LabelsResponse, PairsResponse, ScoreRequest
from mizzen.gateway.responses.response_bodies import DeletedResponse, ResponsesResponse
from mizzen.gateway.responses.schemas import NamespaceTool, ResponsesRequest, ResponseTool

REQUESTS: tuple[type, ...] = (
    ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, CountTokensRequest, EmbeddingRequest,
    ScoreRequest, RerankRequest, ClassifyRequest, ModerationRequest, PoolingRequest, CohereEmbedRequest,
    TokenizeRequest, DetokenizeRequest,
)  # fmt: skip
"""Types of all request bodies, in the order in which docs/openai.md describes them."""
REQUEST_PARTS: tuple[type, ...] = (
    ResponseTool, NamespaceTool, TextBlock, ImageBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock,
    ToolResultBlock, CustomTool,
)  # fmt: skip
"""Types of objects in request bodies that are decoded separately, so that no other type contains them."""
RESPONSES: tuple[type, ...] = (
    ChatResponse, CompletionResponse, ResponsesResponse, EmbeddingResponse, PairsResponse, LabelsResponse,
    RerankResponse, ClassifyResponse, ModerationResponse, PoolingResponse, CohereEmbedResponse,
    DeletedResponse, MessageResponse, CountTokensResponse, TokenizeResponse, DetokenizeResponse, Model,
    ModelList,
)  # fmt: skip
"""Types of all response bodies."""
REF_TEMPLATE = "#/components/schemas/{name}"


SSE_SCHEMA = {
    "description": "A server-sent event; `data` is JSON text, or `[DONE]`.",
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}


class ErrorDetail(msgspec.Struct):
    """An error, in OpenAI's JSON shape."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Body of every error response."""

    error: ErrorDetail


def describe_operation(
    request: type, *responses: type, stream: bool = False, error: type = ErrorBody
) -> dict[str, Any]:
    """Return the OpenAPI description of an operation's request, responses and errors.

    Args:
        request: Type of the request body, one of `REQUESTS`.
        responses: Types that the response body may have, from `RESPONSES`.
        stream: True if the response may also be a stream of events.
        error: Type of the body of error responses.
    """
    errors = ERROR_DESCRIPTIONS if error is ErrorBody else MESSAGES_ERROR_DESCRIPTIONS
    schemas = [schema_reference(response) for response in responses]
    content: dict[str, Any] = {
        "application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
    }
    if stream:
        content["text/event-stream"] = {"schema": SSE_SCHEMA}
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schema_reference(request)}},
        },
        "responses": {
            "200": {"description": "The answer", "content": content},
            **{code: describe_error(text, error) for code, text in errors.items()},
        },
    }


def describe_response(response: type) -> dict[str, Any]:
    """Return the OpenAPI description of an operation without a request body."""
    content = {"application/json": {"schema": schema_reference(response)}}
    return {
        "responses": {
            "200": {"description": "The answer", "content": content},
            "404": describe_error(ERROR_DESCRIPTIONS["404"]),
        },
    }


ERROR_DESCRIPTIONS = {
    "400": "The request is invalid; `param` names the field",
    "401": "The API key is missing or unknown",
    "403": "The API key does not allow this",
    "404": "The model does not exist",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "415": "The Content-Encoding of the body is not supported",
    "429": "Too many requests; try again after Retry-After seconds",
    "502": "The engine lost the request",
    "503": "No engine can take the request; try again after Retry-After seconds",
    "504": "The request exceeded its timeout",
}


MESSAGES_ERROR_DESCRIPTIONS = {
    **{code: text for code, text in ERROR_DESCRIPTIONS.items() if code != "503"},
    "400": "The request is invalid; the message names the field",
    str(OVERLOADED_STATUS): ERROR_DESCRIPTIONS["503"],
}


def describe_error(text: str, kind: type = ErrorBody) -> dict[str, Any]:
    """Return the OpenAPI description of an error response whose body has type `kind`."""
    return {"description": text, "content": {"application/json": {"schema": schema_reference(kind)}}}


def schema_reference(kind: type) -> dict[str, str]:
    """Return a reference to a struct's schema in the OpenAPI document."""
    return {"$ref": REF_TEMPLATE.format(name=kind.__name__)}


def install_openapi(app: FastAPI, *, strict_fields: bool) -> None:
    """Add the schemas of all bodies to an application's OpenAPI document; drop FastAPI's 422 responses.

    With `strict_fields`, the schemas of requests forbid unknown fields.
    """
    build_document = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema:
            return app.openapi_schema
        document = build_document()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # FastAPI's own; never sent
        bodies = (*REQUESTS, *REQUEST_PARTS, *RESPONSES, ErrorBody, MessagesErrorBody)
        _, schemas = msgspec.json.schema_components(bodies, ref_template=REF_TEMPLATE)
        for schema in schemas.values():
            if not strict_fields and schema.get("additionalProperties") is False:
                del schema["additionalProperties"]
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        app.openapi_schema = document
        return document

    app.openapi = openapi
