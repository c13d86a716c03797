# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests with the official OpenAI client, a gateway and a real engine with the demo model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from demo_completions import DEMO_MODEL as MODEL
from mizzen.gateway.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


@pytest.fixture
async def gateway(live_demo: Callable[..., Any]) -> Any:
    return await live_demo(any_dimensions=True)


@pytest.fixture
def client(gateway: Any) -> openai.AsyncOpenAI:
    return gateway.client().with_options(timeout=120)


@pytest.fixture
def post(gateway: Any) -> Callable[..., Any]:
    """Return a function that posts a body and returns the status and the JSON response."""

    async def send(path: str, **body: Any) -> tuple[int, Any]:
        async with httpx.AsyncClient(timeout=120) as http:
            response = await http.post(f"{gateway.url}{path}", json={"model": "demo", **body})
        return response.status_code, response.json()

    return send
