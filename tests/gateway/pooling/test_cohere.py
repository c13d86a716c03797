# SPDX-License-Identifier: Apache-2.0
"""Cohere's API and its official client: embeddings and reranking."""

from __future__ import annotations

import base64
import json
from typing import Any

import cohere
import numpy as np
import pytest

from mizzen.common.sentence_transformers import POOLING_FILE
from mizzen.gateway.text.tokenizer import Tokenizer

VECTOR = [0.5, -0.5, 0.1, 0.7, -0.1, 0.0, 0.2, 0.3, 0.9]


@pytest.fixture
def engine(scripted: Any, tokenizer_files: Any) -> Any:
    prompts = {"prompts": {"query": "query: ", "document": "passage: "}}
    files = {
        **tokenizer_files,
        POOLING_FILE: json.dumps({"pooling_mode": "lasttoken"}).encode(),
        "config.json": json.dumps({"is_matryoshka": True}).encode(),
        "config_sentence_transformers.json": json.dumps(prompts).encode(),
    }
    engine = scripted(files)
    engine.does.vector = lambda message: VECTOR
    return engine


async def test_cohere_client_embeds_and_reranks(
    live: Any, engine: Any, tokenizer: Tokenizer, received: Any
) -> None:
    gateway = await live(engine)
    async with cohere.AsyncClientV2("key", base_url=gateway.url) as client:
        answer = await client.embed(
            model="demo", texts=["a", "b"], input_type="search_query", embedding_types=["float", "ubinary"]
        )
        ranked = await client.rerank(model="demo", query="q", documents=["x", "y"], top_n=1)
    assert answer.embeddings.float_ == [pytest.approx(VECTOR)] * 2
    assert answer.embeddings.ubinary == [[0b10110011, 0b10000000]] * 2
    assert answer.meta is not None
    assert answer.meta.billed_units is not None
    assert tokenizer.decode(received(engine.embeds[0])) == "query: a"
    lengths = [len(received(message)) for message in engine.embeds[:2]]
    assert answer.meta.billed_units.input_tokens == sum(lengths)
    assert [item.index for item in ranked.results] == [0]
    assert ranked.results[0].relevance_score == pytest.approx(float(np.dot(VECTOR, VECTOR)), abs=1e-5)


async def test_forms_of_vectors(post: Any, engine: Any) -> None:
    forms = ["base64", "binary"]
    response = await post(engine, "/v2/embed", texts=["a"], embedding_types=forms, output_dimension=8)
    assert response.status_code == 200, response.text
    embeddings = response.json()["embeddings"]
    short = np.array(VECTOR[:8], "<f4")
    assert np.frombuffer(base64.b64decode(embeddings["base64"][0]), "<f4") == pytest.approx(
        short / np.linalg.norm(short)
    )
    assert embeddings["binary"] == [[0b10110011 - 128]]
    assert set(embeddings) == set(forms)


async def test_texts_are_cut_unless_forbidden(post: Any, engine: Any, received: Any) -> None:
    long = "Mizzen serves language models. " * 1000
    response = await post(engine, "/v2/embed", texts=["a", long], input_type="search_document")
    assert response.status_code == 200, response.text
    assert max(len(received(message)) for message in engine.embeds) == 2047
    response = await post(engine, "/v2/embed", texts=["a", long], truncate="NONE")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "texts[1]")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"texts": []}, "texts"),
        ({"texts": ["a"], "embedding_types": ["float", "int8"]}, "embedding_types[1]"),
        ({"texts": ["a"], "embedding_types": ["float"] * 7}, "embedding_types"),
        ({"texts": ["a"], "input_type": "image"}, "input_type"),
        ({"texts": ["a"], "truncate": "START"}, "truncate"),
        ({"texts": ["a"], "output_dimension": 10}, "output_dimension"),
        ({"texts": ["a"], "images": ["data:"]}, "images"),
    ],
)
async def test_unsupported_requests_name_the_field(post: Any, engine: Any, body: Any, param: str) -> None:
    response = await post(engine, "/v2/embed", **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
