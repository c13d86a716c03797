# SPDX-License-Identifier: Apache-2.0
"""Reranking: the prompts that engines receive, the scores, and the shapes of several APIs."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import httpx
import numpy as np
import pytest

from mizzen.common.sentence_transformers import POOLING_FILE
from mizzen.gateway.engines.discovered_engine import DiscoveredEngine
from mizzen.gateway.pooling.pair_prompts import DEFAULT_INSTRUCTION, PREFIX, SUFFIX
from mizzen.gateway.text.tokenizer import Tokenizer

QUERY = "What has three masts?"
DOCUMENTS = ["A pod runs containers.", "A ship has three masts: fore, main and mizzen."]
PROMPTS = {"query": "query: ", "document": "passage: "}


def recipe_ids(tokenizer: Tokenizer, query: str, document: str, limit: int = 10**6) -> list[int]:
    """Return the prompt of the recipe on Qwen3-Reranker's model card: the pair is cut, its frame is not."""
    pair = f"<Instruct>: {DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    prefix, suffix = tokenizer.encode(PREFIX, False), tokenizer.encode(SUFFIX, False)
    return prefix + tokenizer.encode(pair, False)[: limit - len(prefix) - len(suffix)] + suffix


def judge(tokenizer: Tokenizer) -> Any:
    """Return log probabilities with which documents about masts get e / (e + 1), and others 1 / (1 + e)."""

    def label_logprob(message: Any, token: int) -> float:
        ids = np.frombuffer(message.prompt, "<i4").tolist()
        fits = "fore, main" in tokenizer.decode(ids)
        return -1.0 if (token == tokenizer.token_id("yes")) == fits else -2.0

    return label_logprob


@pytest.fixture
def engine(scripted: Any, reranker_files: Any, reranker: Tokenizer) -> Any:
    engine = scripted(reranker_files)
    engine.does.label_logprob = judge(reranker)
    return engine


async def test_generative_reranker_gets_its_recipes_prompt(
    post: Any, engine: Any, reranker: Tokenizer, received: Any
) -> None:
    response = await post(engine, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
    assert response.status_code == 200, response.text
    prompts = sorted(map(received, engine.requests))
    assert prompts == sorted(recipe_ids(reranker, QUERY, document) for document in DOCUMENTS)
    labels = (reranker.token_id("yes"), reranker.token_id("no"))
    assert {message.sampling.logprob_token_ids for message in engine.requests} == {labels}
    answer = response.json()
    assert [item["index"] for item in answer["results"]] == [1, 0]
    high = 1 / (1 + math.exp(-1))
    assert [item["relevance_score"] for item in answer["results"]] == pytest.approx([high, 1 - high])
    assert answer["results"][0]["document"] == {"text": DOCUMENTS[1]}
    assert answer["usage"]["total_tokens"] == answer["meta"]["tokens"]["input_tokens"]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_continue_finds_the_scores_of_its_chunks(post: Any, engine: Any) -> None:
    """Continue's provider `vllm` reads `results`, its provider `openai` reads `data`; both sort by index."""
    answer = (await post(engine, "/v1/rerank", query=QUERY, documents=DOCUMENTS)).json()
    for name in ("results", "data"):
        items = sorted(answer[name], key=lambda item: item["index"])
        scores = [item["relevance_score"] for item in items]
        assert len(scores) == 2
        assert scores[0] < 0.5 < scores[1]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
async def test_litellm_gets_ranked_documents(post: Any, engine: Any, path: str) -> None:
    """litellm 1.110 sends this body, as `hosted_vllm` and `jina_ai` to /v1/rerank, as `cohere` to /v2/rerank.

    It needs `results` with an index and a score each, and reads usage from `usage`, `meta` or both.
    """
    response = await post(engine, path, query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=True)
    assert response.status_code == 200, response.text
    assert "x-mizzen-ignored" not in response.headers
    answer = response.json()
    assert answer["id"]
    assert [item["index"] for item in answer["results"]] == [1, 0]
    assert [item["document"] for item in answer["results"]] == [
        {"text": DOCUMENTS[1]},
        {"text": DOCUMENTS[0]},
    ]
    assert {type(item["relevance_score"]) for item in answer["results"]} == {float}
    assert answer["usage"]["total_tokens"] == answer["meta"]["tokens"]["input_tokens"] > 0


async def test_options_of_results(post: Any, engine: Any) -> None:
    response = await post(
        engine, "/v2/rerank", query=QUERY, documents=[{"text": text} for text in DOCUMENTS], top_n=1
    )
    assert [item["index"] for item in response.json()["results"]] == [1]
    assert "document" not in response.json()["results"][0]
    for name in ("activation", "use_activation", "apply_softmax"):
        body = {"query": QUERY, "documents": DOCUMENTS, "return_documents": False, name: False}
        logits = await post(engine, "/rerank", **body)
        assert [item["relevance_score"] for item in logits.json()["results"]] == pytest.approx([1, -1])


@pytest.mark.parametrize("limit", [80, 95])
async def test_long_document_is_cut_and_the_query_is_not(
    post: Any, engine: Any, reranker: Tokenizer, received: Any, limit: int
) -> None:
    document = "Mizzen serves language models. " * 40
    frame = len(recipe_ids(reranker, QUERY, ""))
    response = await post(
        engine, "/rerank", query=QUERY, documents=[document], truncate_prompt_tokens=frame + limit
    )
    assert response.status_code == 200, response.text
    ids = received(engine.requests[0])
    assert frame + limit - 2 <= len(ids) <= frame + limit
    assert (
        ids[: -len(reranker.encode(SUFFIX, False)) - 2]
        == recipe_ids(reranker, QUERY, document)[: len(ids)][: -len(reranker.encode(SUFFIX, False)) - 2]
    )
    assert ids[-8:] == reranker.encode(SUFFIX, False)[-8:]


async def test_limit_of_documents_and_of_the_context(post: Any, engine: Any, received: Any) -> None:
    document = "Mizzen serves language models. " * 2000
    body = {"query": QUERY, "documents": ["short", document]}
    response = await post(engine, "/rerank", **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "documents[1]")
    assert error["code"] == "context_length_exceeded"
    response = await post(engine, "/rerank", **body, max_tokens_per_doc=3)
    assert response.status_code == 200, response.text
    lengths = [len(received(message)) for message in engine.requests[-2:]]
    assert max(lengths) - min(lengths) <= 3
    response = await post(engine, "/rerank", **body, truncate_prompt_tokens=-1)
    assert response.status_code == 200, response.text
    assert 2040 <= max(len(received(message)) for message in engine.requests[-2:]) <= 2047
    response = await post(engine, "/rerank", **body, truncate_prompt_tokens=20)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "query")


async def test_template_with_roles_of_pairs_is_preferred(
    post: Any, scripted: Any, reranker_files: Any, reranker: Tokenizer, received: Any
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'query' %}Q: {{ m.content }}{% elif m.role == 'document' %} "
        "D: {{ m.content }}{% else %}I: {{ m.content }} {% endif %}{% endfor %} ->"
    )
    config = json.dumps({"chat_template": template}).encode()
    engine = scripted({**reranker_files, "tokenizer_config.json": config})
    response = await post(engine, "/rerank", query="a b", documents=["c d"], instruction="be strict")
    assert response.status_code == 200, response.text
    assert reranker.decode(received(engine.requests[0])) == "I: be strict Q: a b D: c d ->"


async def test_embedding_model_scores_by_cosine(
    post: Any, scripted: Any, tokenizer_files: Any, tokenizer: Tokenizer, received: Any
) -> None:
    files = {
        **tokenizer_files,
        POOLING_FILE: json.dumps({"pooling_mode": "lasttoken"}).encode(),
        "config_sentence_transformers.json": json.dumps({"prompts": PROMPTS}).encode(),
    }
    engine = scripted(files)
    vectors = {"query: q": [1.0, 0.0], "passage: x": [0.6, 0.8], "passage: y": [0.8, -0.6]}
    engine.does.vector = lambda message: vectors[tokenizer.decode(received(message))]
    response = await post(engine, "/rerank", query="q", documents=["x", "y"])
    assert response.status_code == 200, response.text
    results = response.json()["results"]
    assert [(item["index"], item["relevance_score"]) for item in results] == [
        (1, pytest.approx(0.8)),
        (0, pytest.approx(0.6)),
    ]


async def test_other_models_are_refused(post: Any, scripted: Any, tokenizer_files: Any) -> None:
    response = await post(scripted(tokenizer_files), "/rerank", query="q", documents=["x"])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


async def test_score_that_is_not_a_number_is_an_error(post: Any, engine: Any) -> None:
    engine.does.label_logprob = lambda message, token: float("nan")
    response = await post(engine, "/rerank", query="q", documents=["x"])
    assert (response.status_code, response.json()["error"]["code"]) == (502, "not_a_number")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": ["a", ""]}, "documents[1]"),
        ({"query": "q", "documents": ["a"] * 1000, "instruction": "i" * 17_000}, "documents"),
        ({"query": "q", "documents": ["a", {"title": "b"}]}, "documents[1].text"),
        ({"query": "q", "documents": ["a"], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"query": "q", "documents": ["a"], "rank_fields": ["title"]}, "rank_fields"),
    ],
)
async def test_invalid_requests_name_the_field(post: Any, engine: Any, body: Any, param: str) -> None:
    response = await post(engine, "/v1/rerank", **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not engine.requests


async def test_request_waits_for_an_engine(live: Any, engine: Any, until: Any) -> None:
    """While no engine serves, it is not known how the model scores, so the request waits in the queue."""
    gateway = await live("ipc:///nonexistent/engine", wait=False)
    async with httpx.AsyncClient(timeout=60, base_url=gateway.url) as client:
        body = {"model": "demo", "query": QUERY, "documents": DOCUMENTS}
        answer = asyncio.create_task(client.post("/rerank", json=body))
        await until(lambda: len(gateway.gateway.admission) == 1)
        gateway.gateway.table.sync([DiscoveredEngine(name="late", uid="1", endpoint=engine.endpoint)])
        assert (await answer).status_code == 200
