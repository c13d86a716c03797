# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document matches the endpoints, and docs/openai.md describes every field in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from hypothesis import HealthCheck, settings
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

# Imported here, because if schemathesis imports it later, garbage collection of other tests may interrupt it.
from schemathesis.specs.openapi.schemas import OpenApiSchema

from mizzen.gateway.anthropic.schemas import CountTokensRequest, MessagesRequest
from mizzen.gateway.openai.openapi_document import REQUESTS
from mizzen.gateway.openai.schemas import ChatRequest, CompletionRequest
from mizzen.gateway.pooling.embeddings import EmbeddingRequest
from mizzen.gateway.responses.schemas import ResponsesRequest

PAGE = Path(__file__).parents[3] / "docs/openai.md"
CHECKS = [content_type_conformance, response_schema_conformance, status_code_conformance]


@pytest.fixture(scope="module")
def document(simulated_url: str) -> Any:
    document = httpx.get(f"{simulated_url}/openapi.json", timeout=60).json()
    bounded = schemathesis.Config.from_dict({"phases": {"coverage": {"enabled": False}}})
    schema = schemathesis.openapi.from_dict(document, config=bounded)
    assert isinstance(schema, OpenApiSchema)
    return schema


schema = schemathesis.pytest.from_fixture("document")


@schema.parametrize()
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
def test_responses_conform_to_the_document(case: Any, simulated_url: str) -> None:
    """Requests are generated for every endpoint; some of their bodies are valid, and others are not."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "demo"
    response = case.call(base_url=simulated_url)
    assert response.status_code != 500
    case.validate_response(response, checks=CHECKS)


def test_every_reference_in_the_document_resolves(simulated_url: str) -> None:
    document = httpx.get(f"{simulated_url}/openapi.json", timeout=60)
    schemas = document.json()["components"]["schemas"]
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', document.text))
    assert "$defs" not in document.text
    assert names <= set(schemas)
    assert {kind.__name__ for kind in REQUESTS} <= set(schemas)
    for path, operations in document.json()["paths"].items():
        for method, operation in operations.items():
            assert "422" not in operation["responses"], (path, method)


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_docs_describe_every_request_field(kind: type[msgspec.Struct]) -> None:
    section = PAGE.read_text().partition(f"\n### {kind.__name__}\n")[2].partition("\n### ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", section, re.MULTILINE))
    assert set(rows) == {field.encode_name for field in msgspec.structs.fields(kind)}
    assert all(meaning.strip() for meaning in rows.values())


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (ChatParams, ChatRequest),
        (CompletionParams, CompletionRequest),
        (ResponseCreateParamsBase, ResponsesRequest),
        (EmbeddingCreateParams, EmbeddingRequest),
        (MessageCreateParamsBase, MessagesRequest),
        (MessageCountTokensParams, CountTokensRequest),
    ],
)
def test_every_parameter_of_the_official_client_is_known(params: Any, kind: type[msgspec.Struct]) -> None:
    assert set(params.__annotations__) <= {field.encode_name for field in msgspec.structs.fields(kind)}
