# SPDX-License-Identifier: Apache-2.0
"""`POST /debug/route` of the admin port: explains how a request would be routed, without sending it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mizzen.gateway.admission.queue_entry import QueueEntry
from mizzen.gateway.engines.engine_client import EngineClient
from mizzen.gateway.gateway import Gateway
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.routed_request import RoutedRequest
from mizzen.gateway.routing.router import Verdict
from mizzen.gateway.routing.session import get_session

Headers = list[tuple[bytes, bytes]]


async def explain_route(
    gateway: Gateway, body: bytes, headers: Headers, parse: Callable[[bytes], GenerationRequest]
) -> dict[str, Any]:
    """Return the router's verdict on each engine for a chat or completion request, best score first.

    Args:
        gateway: the gateway whose services and engines are considered.
        body: body of the request.
        headers: headers of the request.
        parse: parses the body.

    Raises:
        ApiError: `parse` rejects the body; 404 if no service serves the model, 503 if no engine serves.
    """
    generation = parse(body).split_sequences()[0]
    service = gateway.find_service(generation.model, {})
    routed = RoutedRequest(
        generation=generation,
        queue_entry=QueueEntry(time.monotonic()),
        session=get_session(headers, generation.session),
    )
    verdicts = await service.dispatcher.explain(routed)
    return {
        "service": service.name,
        "prompt_tokens": len(routed.prompt),
        "prompt_blocks": len(routed.block_hashes),
        "session": routed.session,
        "engines": sorted(map(describe_engine, verdicts), key=lambda engine: -engine["score"]),
    }


def describe_engine(verdict: Verdict[EngineClient]) -> dict[str, Any]:
    """Return the router's verdict on one engine as a JSON object."""
    engine = verdict.engine
    return {
        "name": engine.name,
        "state": engine.state,
        "revision": engine.revision,
        "breaker": engine.breaker.state.name.lower(),
        "suspect": engine.suspect,
        "left_out_by": verdict.excluded_by,
        "matched_tokens": verdict.matched_tokens,
        "load_tokens": round(engine.load),
        "requests": engine.requests,
        "known_blocks": len(engine.prefixes),
        "scores": {name: round(score, 4) for name, score in verdict.scores.items()},
        "score": round(verdict.total, 4),
    }
