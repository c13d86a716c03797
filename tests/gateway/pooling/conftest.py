# SPDX-License-Identifier: Apache-2.0
"""Models for the tests of this folder: a reranker's tokenizer, and what scripted engines received."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers

from mizzen.gateway.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def reranker_files(tokenizer_files: dict[str, bytes]) -> dict[str, bytes]:
    """Files of a model like Qwen3-Reranker: no BOS, and the tokens `yes`, `no` and `<think>`."""
    inner = tokenizers.Tokenizer.from_buffer(tokenizer_files["tokenizer.json"])
    inner.post_processor = tokenizers.processors.ByteLevel()
    inner.add_tokens(["yes", "no", "<think>", "</think>"])
    return {
        "tokenizer.json": inner.to_str().encode(),
        "config.json": json.dumps({"model_type": "qwen3"}).encode(),
    }


@pytest.fixture
def reranker(reranker_files: dict[str, bytes]) -> Tokenizer:
    return Tokenizer.from_files(reranker_files)


@pytest.fixture
def post(live: Any) -> Callable[..., Any]:
    """Return a function that starts a gateway for an engine, and posts a request to it."""

    async def send(engine: Any, path: str, *, gateway: dict[str, Any] | None = None, **body: Any) -> Any:
        running = await live(engine, **(gateway or {}))
        async with httpx.AsyncClient(timeout=60, base_url=running.url) as client:
            return await client.post(path, json={"model": "demo", **body})

    return send


def prompt_ids(message: Any) -> list[int]:
    """Return the token ids of the prompt in a message to an engine."""
    return np.frombuffer(message.prompt, "<i4").tolist()


@pytest.fixture
def received() -> Callable[[Any], list[int]]:
    return prompt_ids
