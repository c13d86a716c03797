# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of the Messages API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import anthropic
import numpy as np
import pytest


@pytest.fixture
def model(thinking_model: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that starts an engine with a fixed answer."""
    return thinking_model


@pytest.fixture
async def client() -> AsyncIterator[Callable[..., anthropic.AsyncAnthropic]]:
    """Return a function that creates Anthropic's official client of a gateway."""
    clients: list[anthropic.AsyncAnthropic] = []

    def create(gateway: Any, api_key: str = "none", **options: Any) -> anthropic.AsyncAnthropic:
        options = {"max_retries": 0, "timeout": 60, **options}
        clients.append(anthropic.AsyncAnthropic(base_url=gateway.url, api_key=api_key, **options))
        return clients[-1]

    yield create
    for opened in clients:
        await opened.close()


@pytest.fixture
def prompt_of() -> Callable[[Any], str]:
    """Return a function that returns the text of the last prompt that an engine received."""

    def read(engine: Any) -> str:
        ids = np.frombuffer(engine.requests[-1].prompt, "<i4").tolist()
        text: str = engine.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    return read
