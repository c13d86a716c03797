# SPDX-License-Identifier: Apache-2.0
"""Converts messages of the gRPC API to and from the bodies of the HTTP API."""

from __future__ import annotations

import base64
from typing import Any

from mizzen.gateway.grpc import inference_pb2 as pb

CONSTRAINTS = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}
"""Fields of `structured_outputs` by the names of the alternatives of `structured_output`."""
TOKEN_PREFIX = "token_id:"
"""Prefix of token ids in the log probabilities of the HTTP API."""


def completion_body(request: pb.GenerateRequest) -> dict[str, Any]:
    """Return the body of the streamed request to `/v1/completions`; fields that are not set are left out."""
    body: dict[str, Any] = {
        "model": request.model,
        "prompt": list(request.prompt_token_ids),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if request.HasField("priority"):
        body["priority"] = request.priority
    for field, value in request.sampling.ListFields():
        if field.name in CONSTRAINTS:
            body["structured_outputs"] = {CONSTRAINTS[field.name]: value}
        else:
            body[field.name] = value if isinstance(value, (int, float)) else list(value)
    return body


def generate_response(event: dict[str, Any], with_text: bool) -> pb.GenerateResponse | None:
    """Return the response for an event of a stream of `/v1/completions`; None if the event holds nothing."""
    response = pb.GenerateResponse()
    for choice in event.get("choices") or ():
        response.token_ids.extend(choice.get("token_ids") or ())
        response.finish_reason = choice.get("finish_reason") or ""
        if with_text:
            response.text = choice.get("text") or ""
        if choice.get("logprobs"):
            response.logprobs.extend(token_logprobs(choice["logprobs"]))
    if event.get("usage"):
        response.usage.CopyFrom(usage(event["usage"]))
    return response if response.ListFields() else None


def token_logprobs(logprobs: dict[str, Any]) -> list[pb.TokenLogprobs]:
    """Return the log probabilities of tokens, and of the most probable tokens at their positions."""
    return [
        pb.TokenLogprobs(
            logprob=value,
            top_token_ids=[int(token.removeprefix(TOKEN_PREFIX)) for token in top or ()],
            top_logprobs=(top or {}).values(),
        )
        for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    ]


def usage(fields: dict[str, Any]) -> pb.Usage:
    """Return the numbers of tokens of a request."""
    details = fields.get("prompt_tokens_details") or {}
    return pb.Usage(
        prompt_tokens=fields.get("prompt_tokens", 0),
        completion_tokens=fields.get("completion_tokens", 0),
        cached_tokens=details.get("cached_tokens", 0),
    )


def embedding_body(request: pb.EmbedRequest) -> dict[str, Any]:
    """Return the body of the request to `/v1/embeddings`."""
    inputs = [list(entry.ids) for entry in request.inputs]
    body: dict[str, Any] = {"model": request.model, "input": inputs, "encoding_format": "base64"}
    if request.HasField("dimensions"):
        body["dimensions"] = request.dimensions
    return body


def embed_response(body: dict[str, Any]) -> pb.EmbedResponse:
    """Return the response for a response of `/v1/embeddings`."""
    vectors = [pb.Embedding(values=base64.b64decode(entry["embedding"])) for entry in body["data"]]
    return pb.EmbedResponse(embeddings=vectors, usage=usage(body["usage"]))
