# SPDX-License-Identifier: Apache-2.0
"""Embeddings of an encoder over HTTP: its tokenizer, pooling and limit, through a gateway and an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from encoders.twins import embed_alone, save_encoder, save_pooling, save_wordpiece
from mizzen.core.request import Pooling

TEXTS = ["Paris", "Which city is the capital of France and Berlin?", "the " * 30]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """The folder of a BERT, the model and its tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    model, tokenizer = save_encoder(folder, "Bert", max_position_embeddings=40), save_wordpiece(folder)
    save_pooling(folder, Pooling.CLS)
    return folder, model, tokenizer


@pytest.fixture(scope="module")
def engine(encoder: Any, run_engine: Callable[..., Any]) -> Iterator[str]:
    with run_engine(encoder[0], has_kv=False) as endpoint:
        yield endpoint


async def test_texts_are_embedded_as_by_transformers(
    encoder: Any, engine: str, live: Callable[..., Any]
) -> None:
    _, model, tokenizer = encoder
    gateway = await live(engine)
    expected = []
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert (ids[0], ids[-1]) == (2, 3)
        expected.append(torch.nn.functional.normalize(embed_alone(model, ids, Pooling.CLS), dim=0).numpy())
    async with httpx.AsyncClient(timeout=120, base_url=gateway.url) as client:
        body = {"model": "demo", "input": TEXTS}
        answer = (await client.post("/v1/embeddings", json=body)).json()
        vectors = [item["embedding"] for item in answer["data"]]
        np.testing.assert_allclose(vectors, expected, atol=2e-5)
        assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(text).ids) for text in TEXTS)
        longest = {"model": "demo", "input": "the " * 38}
        assert (await client.post("/v1/embeddings", json=longest)).status_code == 200
        refused = await client.post("/v1/embeddings", json={"model": "demo", "input": "the " * 39})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        generated = await client.post("/v1/completions", json={"model": "demo", "prompt": "Paris"})
        assert generated.status_code == 400
