# SPDX-License-Identifier: Apache-2.0
"""Classification, pooling and moderation with engines that return given logits or log probabilities."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mizzen.gateway.pooling.moderation_categories import parse_mapping
from mizzen.gateway.text.tokenizer import Tokenizer

LABELS = ("safe", "hate", "spam")
LOGITS = [0.5, 2.0, -1.0]
GUARD_TEMPLATE = (
    "Task: Check if there is unsafe content.\n<BEGIN UNSAFE CONTENT CATEGORIES>\nS1: Violent Crimes.\n"
    "S10: Hate.\nS14: Code Interpreter Abuse.\n<END>\n{{ messages[0].content }}<END CONVERSATION>"
)


@pytest.fixture
def classifier(scripted: Any) -> Any:
    engine = scripted(task="classify", labels=LABELS, score_activation="softmax", generates=False)
    engine.does.vector = lambda message: LOGITS
    return engine


def softmax(logits: list[float]) -> list[float]:
    weights = np.exp(logits)
    return (weights / weights.sum()).tolist()


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
async def test_classes_have_the_shape_of_vllm(post: Any, classifier: Any, path: str) -> None:
    response = await post(classifier, path, input=["a", "b"])
    assert response.status_code == 200, response.text
    item = response.json()["data"][1]
    assert (item["index"], item["label"], item["num_classes"]) == (1, "hate", 3)
    assert item["probs"] == pytest.approx(softmax(LOGITS))
    assert {message.classify for message in classifier.embeds} == {True}
    logits = await post(classifier, path, input="a", activation=False)
    assert logits.json()["data"][0]["probs"] == pytest.approx(LOGITS)


async def test_single_label_gets_the_logistic_function(post: Any, scripted: Any) -> None:
    engine = scripted(task="classify", labels=("relevant",), score_activation="sigmoid", generates=False)
    engine.does.vector = lambda message: [1.5]
    response = await post(engine, "/classify", input="a")
    assert response.json()["data"][0]["probs"] == pytest.approx([1 / (1 + math.exp(-1.5))])


async def test_other_models_do_not_classify(post: Any, scripted: Any) -> None:
    for path in ("/classify", "/v1/moderations"):
        response = await post(scripted(), path, input="a")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


async def test_pooling_returns_vectors_or_labels(post: Any, classifier: Any, scripted: Any) -> None:
    response = await post(classifier, "/pooling", input="a")
    assert response.json()["data"][0]["data"] == pytest.approx(softmax(LOGITS))
    engine = scripted()
    response = await post(engine, "/pooling", input=["a", "b"], task="embed", activation=False)
    assert [item["data"] for item in response.json()["data"]] == [pytest.approx([0.6, 0.8])] * 2
    assert {message.normalize for message in engine.embeds} == {False}


async def test_cross_encoder_reranks(post: Any, scripted: Any, tokenizer: Tokenizer, received: Any) -> None:
    head = {"task": "classify", "labels": ("LABEL_0",), "score_activation": "sigmoid"}
    engine = scripted(**head, generates=False, pooling="max_tokens")  # which only matters for embeddings
    engine.does.vector = lambda message: [2.0 if "masts" in tokenizer.decode(received(message)) else -1.0]
    response = await post(engine, "/rerank", query="q", documents=["pod", "three masts"])
    assert response.status_code == 200, response.text
    results = response.json()["results"]
    assert [item["index"] for item in results] == [1, 0]
    assert results[0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(-2)))
    response = await post(engine, "/v1/score", text_1="q", text_2=["pod", "three masts"])
    scores = [item["score"] for item in response.json()["data"]]
    assert scores == pytest.approx([1 / (1 + math.exp(1)), 1 / (1 + math.exp(-2))])
    response = await post(engine, "/v1/score", text_1="q" * 17_000, text_2=["pod"] * 1000)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "text_2")


async def test_score_errors_name_the_prompt(post: Any, scripted: Any) -> None:
    engine = scripted()
    long = "Mizzen serves language models. " * 1000
    response = await post(engine, "/v1/score", text_1="q", text_2=["a", long])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "text_2[1]")
    body = {"query": "q", "items": ["a", long], "label_token_ids": [5]}
    response = await post(engine, "/v1/score", **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "items[1]")
    body = {"query": "q", "items": ["a"], "label_token_ids": list(range(129))}
    response = await post(engine, "/v1/score", **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "label_token_ids")
    engine.does.vector = lambda message: [float("nan"), 1.0]
    response = await post(engine, "/v1/score", text_1="q", text_2="a")
    assert (response.status_code, response.json()["error"]["code"]) == (502, "not_a_number")


async def test_moderation_without_an_activation_has_probabilities(post: Any, scripted: Any) -> None:
    engine = scripted(task="classify", labels=("toxic",), score_activation="none", generates=False)
    engine.does.vector = lambda message: [-1.5]
    response = await post(engine, "/v1/moderations", input="a")
    assert response.json()["results"][0]["category_scores"]["toxic"] == pytest.approx(1 / (1 + math.exp(1.5)))


def test_labels_of_categories_may_contain_an_equals_sign() -> None:
    assert parse_mapping(["a=b=hate"]) == {"a=b": "hate"}


async def test_moderation_by_a_classifier(live: Any, classifier: Any) -> None:
    """The official client reads the result."""
    gateway = await live(classifier)
    answer = await gateway.client().moderations.create(model="demo", input=["a", "b"])
    result = answer.results[1]
    assert result.flagged
    assert (result.categories.hate, result.categories.violence) == (True, False)
    assert result.category_scores.hate == pytest.approx(softmax(LOGITS)[1])
    assert result.category_applied_input_types.hate == ["text"]
    assert result.category_applied_input_types.violence == []
    mapped = await live(classifier, moderation_category=("spam=illicit",))
    answer = await mapped.client().moderations.create(input="a")
    assert not answer.results[0].flagged
    assert answer.results[0].category_scores.illicit == pytest.approx(softmax(LOGITS)[2])
    assert answer.results[0].category_scores.hate == 0


def guard_files() -> dict[str, bytes]:
    """Return the files of a model like Llama Guard 3, with a token for each word and number."""
    words = ["\n", "safe", "unsafe", "S", "1", "10", "14"]
    vocabulary = {word: number for number, word in enumerate([*words, "[UNK]"])}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    parts = tokenizers.Regex(r"\n|[0-9]+|S(?=[0-9])|[^\n0-9]+")
    inner.pre_tokenizer = pre_tokenizers.Split(parts, "isolated")
    inner.decoder = decoders.Fuse()
    config = {"chat_template": GUARD_TEMPLATE}
    return {
        "tokenizer.json": inner.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


async def test_moderation_by_a_guard_model(post: Any, scripted: Any, received: Any) -> None:
    files = guard_files()
    tokens = Tokenizer.from_files(files)
    engine = scripted(files)
    odds = {"safe": 0.2, "unsafe": 0.6, "1": 0.1, "10": 0.2, "14": 0.1}
    logprobs = {tokens.token_id(word): math.log(share) for word, share in odds.items()}
    engine.does.label_logprob = lambda message, token: logprobs[token]
    response = await post(engine, "/v1/moderations", input="some text")
    assert response.status_code == 200, response.text
    result = response.json()["results"][0]
    assert result["flagged"]
    assert result["category_scores"]["hate"] == pytest.approx(0.75 * 0.5)
    assert result["category_scores"]["violence"] == pytest.approx(0.75 * 0.25)
    assert result["category_scores"]["S14"] == pytest.approx(0.75 * 0.25)
    assert {name for name, on in result["categories"].items() if on} == {"hate"}
    endings = sorted(tokens.decode(received(message)[-4:]) for message in engine.requests)
    assert endings[0].endswith("\n\n")
    assert endings[1].endswith("\nunsafe\nS")
    for unknown in (math.nan, -math.inf):
        engine.does.label_logprob = lambda message, token, value=unknown: value
        response = await post(engine, "/v1/moderations", input="some text")
        assert (response.status_code, response.json()["error"]["code"]) == (502, "not_a_number")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "image_url", "image_url": {"url": "data:"}}]}, "input[0]"),
    ],
)
async def test_invalid_moderation_requests(post: Any, classifier: Any, body: Any, param: str) -> None:
    response = await post(classifier, "/v1/moderations", **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
