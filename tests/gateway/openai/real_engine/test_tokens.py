# SPDX-License-Identifier: Apache-2.0
"""Tokenization, rejection and concurrent requests with a real engine and the demo model."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from demo_completions import USER, complete
from mizzen.gateway.text.tokenizer import Tokenizer

pytestmark = pytest.mark.xdist_group("demo-engine")


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_detokenize_round_trip(post: Any, tokenizer: Tokenizer, prefix: str) -> None:
    text = "Mizzen, 世界 🙂"
    _, body = await post(f"{prefix}/tokenize", prompt=text, return_token_strs=True)
    assert body["tokens"] == tokenizer.encode(text)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 2048
    _, bare = await post(f"{prefix}/tokenize", prompt=[text, "a"], add_special_tokens=False)
    assert bare["tokens"] == [tokenizer.encode(part, add_special_tokens=False) for part in (text, "a")]
    assert bare["count"] == [len(ids) for ids in bare["tokens"]]
    _, back = await post(f"{prefix}/detokenize", tokens=bare["tokens"][0])
    assert back == {"prompt": text, "text": text}


async def test_tokenized_conversation_equals_the_prompt(post: Any, client: Any) -> None:
    _, body = await post("/tokenize", messages=USER)
    answer = await client.chat.completions.create(
        model="demo", messages=USER, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert body["tokens"] == answer.model_extra["prompt_token_ids"]
    _, closed = await post("/tokenize", messages=USER, add_generation_prompt=False)
    assert body["tokens"][: closed["count"]] == closed["tokens"]
    assert closed["count"] < body["count"]


async def test_rejection_by_the_engine_gets_400(client: Any) -> None:
    for options, param in (
        ({"prompt": [10**6]}, "prompt"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"prompt": list(range(6, 900)) * 3}, "prompt"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            await complete(client, **{"max_tokens": 3, **options})
        assert error.value.param == param


async def test_concurrent_requests_get_the_answers_of_separate_requests(client: Any) -> None:
    """Requests of different kinds get the same answers whether they run concurrently or one by one."""
    alone = await complete(client, temperature=0, max_tokens=8)
    answers = await asyncio.gather(
        *(complete(client, temperature=0, max_tokens=8, n=2) for _ in range(4)),
        *(complete(client, temperature=1, max_tokens=8, logprobs=2, echo=True) for _ in range(4)),
        *(client.embeddings.create(model="demo", input=["a", "b"]) for _ in range(4)),
    )
    for answer in answers[:4]:
        assert [choice.text for choice in answer.choices] == [alone.choices[0].text] * 2
