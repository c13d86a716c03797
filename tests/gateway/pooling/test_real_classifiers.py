# SPDX-License-Identifier: Apache-2.0
"""Scores of pairs and labels by real engines over HTTP equal those of Transformers for the same texts.

A cross-encoder that was trained with Transformers puts the right documents first. The expected prompts come
from the `tokenizers` library or from the recipe of a model card.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tokenizers
import torch

from encoders.training import HELD_OUT, QUERIES, is_relevant, train_reranker
from encoders.twins import save_encoder, save_unigram, save_wordpiece
from family_twins import save_twin
from mizzen.gateway.pooling.pair_prompts import DEFAULT_INSTRUCTION, PREFIX, SUFFIX

QUERY = "which city is the capital of france"
DOCUMENTS = ["paris", "berlin is the capital and the city of", "of " * 12]
HEAD = "ForSequenceClassification"


class Served(NamedTuple):
    """A model of Transformers with its tokenizer, and the endpoint of the engine that serves it."""

    model: Any
    tokenizer: tokenizers.Tokenizer
    endpoint: str


def save_decoder(folder: Path, family: str, tokenizer: tokenizers.Tokenizer) -> Any:
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"vocab_size": 512, "id2label": {0: "relevant"}, "max_position_embeddings": 512}
    return save_twin(folder, family, head=HEAD, **values)


def save_reranker(folder: Path) -> tuple[Any, tokenizers.Tokenizer]:
    """Train a BERT as a cross-encoder, and save it with its tokenizer."""
    sizes = {"num_labels": 1, "num_hidden_layers": 2, "std": 0.15}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model, tokenizer = save_encoder(folder, "Bert", HEAD, **sizes, **dropout), save_wordpiece(folder)
    train_reranker(model, tokenizer)
    model.save_pretrained(folder)
    return model, tokenizer


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
    run_engine: Callable[..., Any],
    reranker_files: dict[str, bytes],
    tokenizer_files: dict[str, bytes],
) -> Iterator[dict[str, Served]]:
    """Four classifiers with one label and their engines, which start together."""
    chat = tokenizers.Tokenizer.from_buffer(reranker_files["tokenizer.json"])
    # Without <think>, pairs are joined by the post-processor, here with types that decoders ignore.
    plain = tokenizers.Tokenizer.from_buffer(tokenizer_files["tokenizer.json"])
    plain.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A:0", pair="$A:0 <s>:0 $B:1", special_tokens=[("<s>", plain.token_to_id("<s>"))]
    )
    folders = {name: tmp_path_factory.mktemp(name) for name in ("bert", "roberta", "qwen3", "llama")}
    models = {
        "bert": save_reranker(folders["bert"]),
        "roberta": (
            save_encoder(folders["roberta"], "XLMRoberta", HEAD, num_labels=1),
            save_unigram(folders["roberta"]),
        ),
        "qwen3": (save_decoder(folders["qwen3"], "qwen3", chat), chat),
        "llama": (save_decoder(folders["llama"], "llama", plain), plain),
    }
    with contextlib.ExitStack() as stack:
        endpoints = {
            name: stack.enter_context(run_engine(folder, has_kv=name in ("qwen3", "llama")))
            for name, folder in folders.items()
        }
        yield {name: Served(*models[name], endpoint) for name, endpoint in endpoints.items()}


@pytest.fixture
def start(live: Callable[..., Any], until: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that starts a gateway for a model's engine, and returns it once the engine serves."""

    async def start_gateway(served: Served) -> Any:
        gateway = await live(served.endpoint, wait=False)
        await until(lambda: any(engine.serving for engine in gateway.gateway.table), 180)
        return gateway

    return start_gateway


def encode_pair(name: str, tokenizer: tokenizers.Tokenizer, query: str, document: str) -> Any:
    """Return the token ids and token types of a pair for the model `name`."""
    if name != "qwen3":
        encoding = tokenizer.encode(query, document)
        return encoding.ids, encoding.type_ids
    pair = f"<Instruct>: {DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    ids = [token for part in (PREFIX, pair, SUFFIX) for token in tokenizer.encode(part).ids]
    return ids, [0] * len(ids)


def logit_of(served: Served, ids: list[int], types: list[int]) -> float:
    """Return the logit that Transformers computes; only encoders with several token types get the types."""
    several = getattr(served.model.config, "type_vocab_size", 1) > 1
    options = {"token_type_ids": torch.tensor([types])} if several else {}
    with torch.inference_mode():
        mask = torch.ones(1, len(ids), dtype=torch.int64)
        return served.model(torch.tensor([ids]), attention_mask=mask, **options).logits[0].item()


def sigmoid(logits: list[float]) -> np.ndarray:
    return 1 / (1 + np.exp(-np.array(logits)))


@pytest.mark.parametrize("name", ["bert", "roberta", "qwen3", "llama"])
async def test_scores_and_labels_equal_those_of_transformers(
    served: dict[str, Served], start: Callable[..., Any], name: str
) -> None:
    one = served[name]
    gateway = await start(one)
    async with httpx.AsyncClient(timeout=60, base_url=gateway.url) as client:

        async def post(path: str, **body: Any) -> dict[str, Any]:
            response = await client.post(path, json={"model": "demo", **body})
            assert response.status_code == 200, response.text
            return response.json()

        pairs = [encode_pair(name, one.tokenizer, QUERY, text) for text in DOCUMENTS]
        logits = [logit_of(one, ids, types) for ids, types in pairs]
        ranked = await post("/v1/rerank", query=QUERY, documents=DOCUMENTS)
        scores = {item["index"]: item["relevance_score"] for item in ranked["results"]}
        got = [scores[index] for index in range(len(DOCUMENTS))]
        np.testing.assert_allclose(got, sigmoid(logits), atol=1e-4)
        assert ranked["usage"]["prompt_tokens"] == sum(len(ids) for ids, _ in pairs)
        scored = await post("/v1/score", text_1=QUERY, text_2=DOCUMENTS)
        np.testing.assert_allclose([item["score"] for item in scored["data"]], sigmoid(logits), atol=1e-4)

        texts = [one.tokenizer.encode(text).ids for text in DOCUMENTS]
        alone = [logit_of(one, ids, [0] * len(ids)) for ids in texts]
        for activation, expected in ((True, sigmoid(alone)), (False, np.array(alone))):
            classified = await post("/v1/classify", input=DOCUMENTS, activation=activation)
            got = [item["probs"] for item in classified["data"]]
            np.testing.assert_allclose(got, expected[:, None], atol=1e-4)


async def test_a_trained_cross_encoder_puts_the_right_documents_first(
    served: dict[str, Served], start: Callable[..., Any]
) -> None:
    gateway = await start(served["bert"])
    async with httpx.AsyncClient(timeout=60, base_url=gateway.url) as client:
        for query in QUERIES:
            right = {index for index, text in enumerate(HELD_OUT) if is_relevant(query, text)}
            assert 0 < len(right) < len(HELD_OUT)
            body = {"model": "demo", "query": query, "documents": HELD_OUT}
            results = (await client.post("/v1/rerank", json=body)).json()["results"]
            assert {item["index"] for item in results[: len(right)]} == right
            scores = [item["relevance_score"] for item in results]
            assert min(scores[: len(right)]) > 0.9
            assert max(scores[len(right) :]) < 0.1


async def test_the_types_of_a_cut_pair_decide_its_score(
    served: dict[str, Served], start: Callable[..., Any]
) -> None:
    one = served["bert"]
    gateway = await start(one)
    body = {"model": "demo", "query": QUERY, "documents": DOCUMENTS[2:], "activation": False}
    async with httpx.AsyncClient(timeout=60, base_url=gateway.url) as client:
        response = await client.post("/v1/rerank", json={**body, "truncate_prompt_tokens": 15})
    one.tokenizer.enable_truncation(15, strategy="only_second")
    ids, types = encode_pair("bert", one.tokenizer, QUERY, DOCUMENTS[2])
    one.tokenizer.no_truncation()
    score = response.json()["results"][0]["relevance_score"]
    assert score == pytest.approx(logit_of(one, ids, types), abs=1e-4)
    assert abs(score - logit_of(one, ids, [0] * len(ids))) > 1e-2
