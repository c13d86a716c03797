# SPDX-License-Identifier: Apache-2.0
"""Embedding models: the pooling that a model's files specify, and engines that cannot generate."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from message_samples import filled
from mizzen.common.model_task import Task
from mizzen.common.sentence_transformers import POOLING_FILE
from mizzen.core.request import Pooling
from mizzen.gateway.text.pooling import model_pooling
from mizzen.wire.messages import Embed, Generate, Sampling, Welcome
from mizzen.wire.server.invalid_request import InvalidRequest
from mizzen.wire.server.request_validation import MessageValidator

POOLED = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "include_prompt": True}
PROMPT = np.array([1, 2, 3], "<i4").tobytes()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, Pooling.LAST),
        ({**POOLED, "pooling_mode_mean_tokens": True}, Pooling.MEAN),
        ({**POOLED, "pooling_mode_lasttoken": True}, Pooling.LAST),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
        ({"pooling_mode": "lasttoken"}, Pooling.LAST),
        ({**POOLED, "pooling_mode_cls_token": True}, Pooling.CLS),
        ({"pooling_mode": "cls"}, Pooling.CLS),
        ({**POOLED, "pooling_mode_max_tokens": True}, None),
        ({**POOLED, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, None),
        ({"pooling_mode": ["mean"]}, None),
        (POOLED, None),
        ([], None),
    ],
)
def test_pooling_is_read_from_the_model_files(config: Any, expected: Pooling | None) -> None:
    files = {} if config is None else {POOLING_FILE: json.dumps(config).encode()}
    assert model_pooling(files) is expected


def test_invalid_pooling_file_gives_no_pooling() -> None:
    assert model_pooling({POOLING_FILE: b"\xff{"}) is None


async def request_embeddings(
    live: Callable[..., Any], engine: Any, path: str, **body: Any
) -> tuple[int, dict[str, Any], list[str]]:
    """Post a request; return the response's status and body, and the poolings requested from the engine."""
    gateway = await live(engine)
    async with httpx.AsyncClient(timeout=60) as client:
        response = await client.post(f"{gateway.url}{path}", json={"model": "demo", **body})
    return response.status_code, response.json(), [message.pooling for message in engine.embeds]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/embeddings", {"input": "a"}, ["mean"]),
        ("/v1/embeddings", {"input": "a", "pooling": "last"}, ["last"]),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, ["mean", "mean"]),
    ],
)
async def test_default_pooling_is_the_models_own(
    live: Any, scripted: Any, tokenizer_files: Any, path: str, body: Any, expected: list[str]
) -> None:
    config = json.dumps({**POOLED, "pooling_mode_mean_tokens": True}).encode()
    engine = scripted({**tokenizer_files, POOLING_FILE: config})
    status, _, poolings = await request_embeddings(live, engine, path, **body)
    assert (status, poolings) == (200, expected)


async def test_unsupported_default_pooling_requires_an_explicit_one(
    live: Any, scripted: Any, tokenizer_files: Any
) -> None:
    config = json.dumps({**POOLED, "pooling_mode_max_tokens": True}).encode()
    engine = scripted({**tokenizer_files, POOLING_FILE: config})
    status, answer, poolings = await request_embeddings(live, engine, "/v1/embeddings", input="a")
    assert (status, answer["error"]["param"], poolings) == (400, "pooling", [])
    status, _, poolings = await request_embeddings(live, engine, "/v1/embeddings", input="a", pooling="mean")
    assert (status, poolings) == (200, ["mean"])


def test_model_without_lm_head_only_embeds() -> None:
    intake = MessageValidator(vocab_size=100, context_length=64, task=Task.EMBED)
    assert intake.to_request(Embed(1, PROMPT), 0.0).pooling is Pooling.LAST
    with pytest.raises(InvalidRequest, match=r"^the model has no language-model head"):
        intake.to_request(Generate(2, PROMPT, Sampling()), 0.0)
    with pytest.raises(InvalidRequest, match=r"^classify must be false"):
        intake.to_request(Embed(3, PROMPT, classify=True), 0.0)


def test_classifier_accepts_requests_for_logits() -> None:
    intake = MessageValidator(vocab_size=100, context_length=64, task=Task.CLASSIFY)
    request = intake.to_request(Embed(1, PROMPT, classify=True, pooling="mean"), 0.0)
    assert request.classify and request.pooling is Pooling.LAST
    assert not intake.to_request(Embed(2, PROMPT), 0.0).classify
    with pytest.raises(InvalidRequest, match="request labels or embeddings"):
        intake.to_request(Generate(3, PROMPT, Sampling()), 0.0)


@pytest.mark.parametrize(
    ("sent", "generates", "task"),
    [
        ("", True, Task.GENERATE),
        ("", False, Task.EMBED),
        ("classify", False, Task.CLASSIFY),
        ("a later one", False, Task.EMBED),
    ],
)
def test_task_of_engines_of_other_releases_is_derived(sent: str, generates: bool, task: Task) -> None:
    assert msgspec.structs.replace(filled(Welcome), task=sent, generates=generates).served_task is task
