"""`POST /debug/route` of the admin port: where a request would go, and why, without sending it anywhere."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from mizzen.gateway.admission.admission import Ticket
from mizzen.gateway.engines.engine_table import Engine
from mizzen.gateway.errors import invalid
from mizzen.gateway.gateway import Gateway
from mizzen.gateway.openai.output_form import FamilyOptions
from mizzen.gateway.openai.parse import Parser
from mizzen.gateway.requests.generation_request import Wish
from mizzen.gateway.requests.routed_request import Job
from mizzen.gateway.routing.router import Verdict
from mizzen.gateway.routing.session import session_of

Headers = list[tuple[bytes, bytes]]


async def explain_route(
    gateway: Gateway, body: bytes, headers: Headers, families: FamilyOptions
) -> dict[str, Any]:
    """Return what routing thinks of each engine for the body of a chat or completion request.

    Raises:
        ApiError: as the endpoint itself would; 503 when no engine serves.
    """
    wish = read_wish(body, families)
    service = gateway.service_named(wish.model, {})
    job = Job(wish=wish, ticket=Ticket(time.monotonic()), session=session_of(headers, wish.session))
    verdicts = await service.dispatcher.explain(job)
    return {
        "service": service.name,
        "prompt_tokens": len(job.prompt),
        "prompt_blocks": len(job.blocks),
        "session": job.session,
        "engines": sorted(map(described, verdicts), key=lambda one: -one["score"]),
    }


def read_wish(body: bytes, families: FamilyOptions) -> Wish:
    """Return the first sequence that a chat or completion request asks for.

    Raises:
        ApiError: 400, which names the field.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"the body must be that of a chat or completion request: {error}"
        raise invalid(text, code="invalid_json") from None
    parser = Parser(families)
    wish = parser.chat(body) if "messages" in fields else parser.completion(body)
    return wish.sequences()[0]


def described(verdict: Verdict[Engine]) -> dict[str, Any]:
    """Return what routing thinks of one engine."""
    engine = verdict.engine
    return {
        "name": engine.name,
        "state": engine.state,
        "revision": engine.revision,
        "breaker": engine.breaker.state.name.lower(),
        "suspect": engine.suspect,
        "left_out_by": verdict.left_out_by,
        "matched_tokens": verdict.matched_tokens,
        "load_tokens": round(engine.load),
        "requests": engine.requests,
        "known_blocks": len(engine.prefixes),
        "scores": {name: round(score, 4) for name, score in verdict.scores.items()},
        "score": round(verdict.total, 4),
    }
