# SPDX-License-Identifier: Apache-2.0
"""Embeddings and scores of a real engine with the demo model."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import pytest

from demo_completions import complete
from mizzen.gateway.text.tokenizer import Tokenizer

pytestmark = pytest.mark.xdist_group("demo-engine")


async def test_embeddings_are_normalized_vectors_of_each_input(client: Any, tokenizer: Tokenizer) -> None:
    texts = ["A ship has masts.", "A vessel has masts.", "x"]
    answer = await client.embeddings.create(model="demo", input=texts, encoding_format="float")
    vectors = np.array([item.embedding for item in answer.data])
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert vectors.shape == (3, 192)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-3)
    assert (
        answer.usage.prompt_tokens
        == answer.usage.total_tokens
        == sum(len(tokenizer.encode(text)) for text in texts)
    )
    packed = await client.embeddings.create(
        model="demo", input=texts
    )  # the client requests base64 by default
    assert np.array([item.embedding for item in packed.data]) == pytest.approx(vectors, abs=2e-2)
    single = await client.embeddings.create(
        model="demo", input=tokenizer.encode(texts[0]), encoding_format="float"
    )
    assert single.data[0].embedding == pytest.approx(vectors[0], abs=2e-2)
    short = await client.embeddings.create(
        model="demo", input=texts[:1], dimensions=16, encoding_format="float"
    )
    cut = vectors[0][:16] / np.linalg.norm(vectors[0][:16])
    assert short.data[0].embedding == pytest.approx(cut, abs=2e-2)


async def test_embedding_options_change_the_vectors(post: Any) -> None:
    _, mean = await post("/v1/embeddings", input="a b c", pooling="mean")
    _, last = await post("/v1/embeddings", input="a b c")
    assert mean["data"][0]["embedding"] != last["data"][0]["embedding"]
    _, raw = await post("/v1/embeddings", input="a b c", normalize=False, encoding_format="base64")
    vector = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
    scaled = vector / np.linalg.norm(vector)
    assert scaled == pytest.approx(last["data"][0]["embedding"], abs=2e-2)
    status, error = await post("/v1/embeddings", input="a", dimensions=193)
    assert (status, error["error"]["param"]) == (400, "dimensions")


async def test_pair_scores_are_cosine_similarities(post: Any) -> None:
    left, right = "A ship", ["A ship", "completely unrelated"]
    _, vectors = await post("/v1/embeddings", input=[left, *right])
    embedded = np.array([item["embedding"] for item in vectors["data"]])
    status, body = await post("/v1/score", text_1=left, text_2=right)
    assert status == 200, body
    scores = [item["score"] for item in body["data"]]
    assert scores == pytest.approx((embedded[1:] @ embedded[0]).tolist(), abs=2e-2)
    assert scores[0] == pytest.approx(1, abs=2e-2)
    _, pairs = await post("/v1/score", text_1=right, text_2=right)
    assert [item["score"] for item in pairs["data"]] == pytest.approx([1, 1], abs=2e-2)


async def test_label_scores_are_probabilities(post: Any, client: Any, tokenizer: Tokenizer) -> None:
    answer = await complete(client, max_tokens=1, temperature=0, logprobs=3, return_tokens_as_token_ids=True)
    top = answer.choices[0].logprobs.top_logprobs[0]
    labels = [int(name.removeprefix("token_id:")) for name in top]
    status, body = await post("/v1/score", query="Mizzen", items=[" is a", " is"], label_token_ids=labels)
    assert status == 200, body
    assert body["scores"][0] == pytest.approx([math.exp(value) for value in top.values()], abs=1e-2)
    _, softmax = await post(
        "/v1/score", query="Mizzen", items=" is a", label_token_ids=labels, apply_softmax=True
    )
    assert sum(softmax["scores"][0]) == pytest.approx(1)
    assert softmax["scores"][0] == pytest.approx(
        np.array(body["scores"][0]) / sum(body["scores"][0]), abs=1e-2
    )
    ids = [tokenizer.encode("Mizzen"), tokenizer.encode(" is a", add_special_tokens=False)]
    _, by_ids = await post("/v1/score", query=ids[0], items=[ids[1]], label_token_ids=labels)
    assert by_ids["scores"][0] == pytest.approx(body["scores"][0], abs=1e-2)
    assert body["usage"]["prompt_tokens"] == sum(
        len(tokenizer.encode("Mizzen" + item)) for item in (" is a", " is")
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ({"text_1": "a", "text_2": "b", "query": "c"}, "query"),
        ({"text_1": "a", "text_2": "b", "apply_softmax": True}, "apply_softmax"),
        ({"text_1": "a", "text_2": "b", "item_first": True}, "item_first"),
        ({"query": "a", "items": "b"}, "label_token_ids"),
        ({"query": "a", "items": "b", "label_token_ids": []}, "label_token_ids"),
        ({"query": "a", "items": [[1]], "label_token_ids": [1]}, "items"),
        ({"query": "a", "items": [], "label_token_ids": [1]}, "items"),
        ({"query": [], "items": "b", "label_token_ids": [1]}, "query"),
        ({"query": "a", "items": "b", "label_token_ids": [10**6]}, "label_token_ids"),
    ],
)
async def test_invalid_score_requests_name_the_field(post: Any, body: Any, param: str) -> None:
    status, answer = await post("/v1/score", **body)
    assert status == 400
    assert answer["error"]["param"] == param
