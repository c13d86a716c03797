"""The OpenAPI document: bodies that are read without FastAPI are described by their structs."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from mizzen.gateway.openai.embeddings import EmbeddingRequest, EmbeddingResponse
from mizzen.gateway.openai.response_bodies import ChatResponse, CompletionResponse, Model, ModelList
from mizzen.gateway.openai.schemas import ChatRequest, CompletionRequest
from mizzen.gateway.openai.score import LabelsResponse, PairsResponse, ScoreRequest
from mizzen.gateway.openai.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from mizzen.gateway.responses.response_bodies import ResponsesResponse
from mizzen.gateway.responses.schemas import ResponsesRequest

REQUESTS: tuple[type, ...] = (
    ChatRequest, CompletionRequest, ResponsesRequest, EmbeddingRequest, ScoreRequest, TokenizeRequest,
    DetokenizeRequest,
)  # fmt: skip
"""Bodies of all requests, in the order of the documentation."""
RESPONSES: tuple[type, ...] = (
    ChatResponse, CompletionResponse, ResponsesResponse, EmbeddingResponse, PairsResponse, LabelsResponse,
    TokenizeResponse, DetokenizeResponse, Model, ModelList,
)  # fmt: skip
TEMPLATE = "#/components/schemas/{name}"


EVENT = {
    "description": "A server-sent event; `data` is JSON text, or `[DONE]`.",
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}


class ErrorDetail(msgspec.Struct):
    """What is wrong with a request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Every error's body."""

    error: ErrorDetail


def described(request: type, *responses: type, stream: bool = False) -> dict[str, Any]:
    """Return the description of an operation's bodies; see `REQUESTS` and `RESPONSES`."""
    answers = [reference(response) for response in responses]
    content: dict[str, Any] = {
        "application/json": {"schema": answers[0] if len(answers) == 1 else {"anyOf": answers}}
    }
    if stream:
        content["text/event-stream"] = {"schema": EVENT}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference(request)}}},
        "responses": {
            "200": {"description": "The answer", "content": content},
            **{code: failed(text) for code, text in FAILURES.items()},
        },
    }


def answered(response: type) -> dict[str, Any]:
    """Return the description of an operation without a body."""
    content = {"application/json": {"schema": reference(response)}}
    return {
        "responses": {
            "200": {"description": "The answer", "content": content},
            "404": failed(FAILURES["404"]),
        },
    }


FAILURES = {
    "400": "The request is wrong; `param` names the field",
    "401": "The API key is missing or unknown",
    "403": "The API key may not do this",
    "404": "There is no such model",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "429": "Too many requests; try again after Retry-After seconds",
    "502": "The engine has lost the request",
    "503": "No engine can take the request; try again after Retry-After seconds",
    "504": "The request did not end within its timeout",
}


def failed(text: str) -> dict[str, Any]:
    """Return the description of an error."""
    return {"description": text, "content": {"application/json": {"schema": reference(ErrorBody)}}}


def reference(kind: type) -> dict[str, str]:
    """Return a reference to a struct's schema."""
    return {"$ref": TEMPLATE.format(name=kind.__name__)}


def describe(app: FastAPI) -> None:
    """Let an application's OpenAPI document hold the schemas of all bodies."""
    document = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema:
            return app.openapi_schema
        found = document()
        for path in found["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # FastAPI's own, which never comes
        kinds = (*REQUESTS, *RESPONSES, ErrorBody)
        _, parts = msgspec.json.schema_components(kinds, ref_template=TEMPLATE)
        found.setdefault("components", {}).setdefault("schemas", {}).update(parts)
        app.openapi_schema = found
        return found

    app.openapi = openapi
