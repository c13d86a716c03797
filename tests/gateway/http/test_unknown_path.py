# SPDX-License-Identifier: Apache-2.0
"""Requests for paths and methods that no endpoint has: the message names what to use."""

from __future__ import annotations

import httpx
import pytest

from mizzen.gateway.app import create_app
from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.http.unknown_path import describe_unknown_path

CHAT = "/v1/chat/completions"
ENDPOINTS = [CHAT, "/v1/completions", "/v1/embeddings", "/v1/models", "/v1/models/{name:path}", "/docs"]


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        ("/chat/completions", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("/v1/chat/completion", CHAT),
        ("/v1/chat/completions/", CHAT),
        ("/models", "/v1/models"),
        ("/v1/audio/speech", None),
        ("/", None),
        ("/v1", None),
        (CHAT + "/" + "x" * 100_000, None),
    ],
)
def test_the_endpoint_that_the_client_means_is_suggested(path: str, suggestion: str | None) -> None:
    message = describe_unknown_path(path, ENDPOINTS)
    assert message == f"there is no {path} here" + (f"; did you mean {suggestion}?" if suggestion else "")


async def test_a_gateway_suggests_paths_and_methods(tmp_path: object) -> None:
    app = create_app(GatewayConfig(served_name="demo", engine=(f"ipc://{tmp_path}/wire",)))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        missing = await client.post("/chat/completions", json={})
        wrong = await client.get(CHAT)
    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == f"there is no /chat/completions here; did you mean {CHAT}?"
    assert wrong.status_code == 405
    assert wrong.json()["error"]["message"] == "GET is not allowed here: use POST"
