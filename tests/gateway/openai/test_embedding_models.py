"""What a gateway makes of an embedding model's files, and of an engine that cannot generate."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from mizzen.core.request import Pooling
from mizzen.gateway.text.pooling import FILE, model_pooling
from mizzen.wire.messages import Embed, Generate, Sampling
from mizzen.wire.server.request_validation import InvalidRequest, MessageValidator

POOLED = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "include_prompt": True}
PROMPT = np.array([1, 2, 3], "<i4").tobytes()


@pytest.mark.parametrize(
    ("noted", "expected"),
    [
        (None, Pooling.LAST),
        ({**POOLED, "pooling_mode_mean_tokens": True}, Pooling.MEAN),
        ({**POOLED, "pooling_mode_lasttoken": True}, Pooling.LAST),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
        ({"pooling_mode": "lasttoken"}, Pooling.LAST),
        ({**POOLED, "pooling_mode_cls_token": True}, None),
        ({**POOLED, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, None),
        ({"pooling_mode": ["mean"]}, None),
        (POOLED, None),
        ([], None),
    ],
)
def test_pooling_of_a_models_files(noted: Any, expected: Pooling | None) -> None:
    files = {} if noted is None else {FILE: json.dumps(noted).encode()}
    assert model_pooling(files) is expected


def test_a_file_that_is_no_json_says_nothing() -> None:
    assert model_pooling({FILE: b"\xff{"}) is None


async def asked(
    live: Callable[..., Any], engine: Any, path: str, **body: Any
) -> tuple[int, dict[str, Any], list[str]]:
    """Return status, answer, and the poolings that the engine was asked for."""
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
async def test_the_models_own_pooling_is_the_default(
    live: Any, scripted: Any, tokenizer_files: Any, path: str, body: Any, expected: list[str]
) -> None:
    noted = json.dumps({**POOLED, "pooling_mode_mean_tokens": True}).encode()
    engine = scripted({**tokenizer_files, FILE: noted})
    status, _, poolings = await asked(live, engine, path, **body)
    assert (status, poolings) == (200, expected)


async def test_a_pooling_that_is_not_served_must_be_replaced_by_name(
    live: Any, scripted: Any, tokenizer_files: Any
) -> None:
    noted = json.dumps({**POOLED, "pooling_mode_cls_token": True}).encode()
    engine = scripted({**tokenizer_files, FILE: noted})
    status, answer, poolings = await asked(live, engine, "/v1/embeddings", input="a")
    assert (status, answer["error"]["param"], poolings) == (400, "pooling", [])
    status, _, poolings = await asked(live, engine, "/v1/embeddings", input="a", pooling="mean")
    assert (status, poolings) == (200, ["mean"])


def test_a_model_without_a_head_takes_embeddings_alone() -> None:
    intake = MessageValidator(vocab_size=100, context_length=64, generates=False)
    assert intake.to_request(Embed(1, PROMPT), 0.0).pooling is Pooling.LAST
    with pytest.raises(InvalidRequest, match=r"^model has no language-model head"):
        intake.to_request(Generate(2, PROMPT, Sampling()), 0.0)
