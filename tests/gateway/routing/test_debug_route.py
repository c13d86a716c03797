# SPDX-License-Identifier: Apache-2.0
"""Routing of sessions; routing decisions that response headers and the debug endpoint show."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import httpx
import pytest

from chat_requests import CHAT


async def test_response_names_its_route_and_debug_endpoint_explains_the_route(
    live: Any, scripted: Any, tmp_path: Any, until: Any
) -> None:
    token = tmp_path / "admin.token"
    token.write_text("s3cret\n")
    engines = [scripted(), scripted()]
    gateway = await live(*engines, admin_token_file=str(token), engine_suspect_seconds=60)
    prompt = list(range(50, 250))
    body = {"model": "demo", "prompt": prompt, "max_tokens": 3}
    admin, wrong = {"authorization": "Bearer s3cret"}, {"authorization": "Bearer wrong"}
    async with httpx.AsyncClient(timeout=60) as http:
        first = await http.post(f"{gateway.url}/v1/completions", json=body)
        engine = dict(field.split("=") for field in first.headers["x-mizzen-route"].split("; "))["engine"]
        assert engine in [scripted_engine.endpoint for scripted_engine in engines]
        second = await http.post(f"{gateway.url}/v1/completions", json=body)
        assert second.headers["x-mizzen-route"] == f"engine={engine}; reason=prefix; matched=192"
        streamed = await http.post(f"{gateway.url}/v1/completions", json={**body, "stream": True})
        assert streamed.headers["x-mizzen-route"] == second.headers["x-mizzen-route"]
        url = f"{gateway.admin}/debug/route"
        assert (await http.post(url, json=body)).status_code == 401
        assert (await http.post(url, json=body, headers=wrong)).status_code == 401
        explanation = (await http.post(url, json={**body, "user": "u"}, headers=admin)).json()
        assert (explanation["prompt_tokens"], explanation["prompt_blocks"], explanation["session"]) == (
            200,
            3,
            "u",
        )
        best, other = explanation["engines"]
        assert (best["name"], best["matched_tokens"]) == (engine, 192)
        assert other["matched_tokens"] == 0
        assert best["scores"]["prefix"] == pytest.approx(1.92)
        assert {"session", "load", "home"} < set(best["scores"])
        chat = await http.post(url, json={**CHAT}, headers={**admin, "x-mizzen-session": "s"})
        assert chat.json()["session"] == "s"
        long = await http.post(url, json={**body, "user": "u" * 7_000_000}, headers=admin)
        assert long.json()["session"] == "blake2b:" + blake2b(b"u" * 7_000_000, digest_size=16).hexdigest()
        for bad, status in ((b"[]", 400), (b"{", 400), (b'{"model": "demo"}', 400)):
            assert (await http.post(url, content=bad, headers=admin)).status_code == status
        absent = await http.post(url, json={**body, "model": "none"}, headers=admin)
        assert absent.status_code == 404
    assert sum(len(scripted_engine.requests) for scripted_engine in engines) == 3, (
        "nothing that was explained was sent"
    )


async def test_debug_route_parses_requests_like_the_endpoint(live: Any, scripted: Any, tmp_path: Any) -> None:
    """The debug endpoint applies the gateway's tool call format and its body limits."""
    (tmp_path / "token").write_text("s3cret")
    options = {"admin_token_file": str(tmp_path / "token"), "tool_parser": "hermes", "max_body_bytes": 2000}
    gateway = await live(scripted(), **options)
    tools = [{"type": "function", "function": {"name": "tell"}}]
    admin = {"authorization": "Bearer s3cret"}
    async with httpx.AsyncClient(timeout=60) as http:
        url = f"{gateway.admin}/debug/route"
        response = await http.post(url, json={**CHAT, "tools": tools}, headers=admin)
        assert response.status_code == 200, response.text
        for path in ("debug/route", "admin/verify"):
            large = await http.post(f"{gateway.admin}/{path}", content=b" " * 2001, headers=admin)
            assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")


async def test_sessions_stay_on_their_engine(live: Any, scripted: Any) -> None:
    """All gateways route a session (headers, prompt_cache_key or user) to the same engine.

    Different sessions spread over the engines.
    """
    engines = [scripted() for _ in range(3)]
    gateways = [await live(*engines, engine_suspect_seconds=60) for _ in range(2)]
    homes: dict[str, set[str]] = {}
    async with httpx.AsyncClient(timeout=60) as http:
        for number in range(24):
            session = f"s{number % 6}"
            how = [{"user": session}, {"prompt_cache_key": session}, {}][number % 3 if number >= 12 else 0]
            header = "x-mizzen-session" if number < 18 else "x-session-affinity"
            headers = {} if how else {header: session}
            gateway = gateways[number % 2]
            body = {**CHAT, "max_tokens": 2, **how}
            response = await http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers)
            route = response.headers["x-mizzen-route"]
            homes.setdefault(session, set()).add(route.partition(";")[0])
    assert all(len(endpoints) == 1 for endpoints in homes.values()), homes
    assert len(set().union(*homes.values())) > 1
