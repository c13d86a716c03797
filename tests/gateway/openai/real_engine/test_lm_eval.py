# SPDX-License-Identifier: Apache-2.0
"""Requests of lm-evaluation-harness 0.4.13, which these tests do not install, for a multiple-choice task.

Its model `local-completions` with `tokenizer_backend=remote` asks the server for tokens, sends the prompts of
a batch as token ids, and reads the log-likelihoods of continuations from the echoed prompts. `make
client-tests` runs the program itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
import transformers

from demo_completions import DEMO_MODEL
from demo_model import score_continuation, trained_answers

pytestmark = pytest.mark.xdist_group("demo-engine")

LETTERS = "ABCD"


class RemoteModel:
    """The requests of the harness, and what it reads from the responses."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def describe(self) -> dict[str, Any]:
        answer = await self._client.get("/tokenizer_info")
        return answer.raise_for_status().json()

    async def encode(self, text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        return (await self._client.post("/tokenize", json=body)).raise_for_status().json()["tokens"]

    async def decode(self, tokens: list[int]) -> str:
        answer = await self._client.post("/detokenize", json={"tokens": tokens})
        return answer.raise_for_status().json()["prompt"]

    async def encode_pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Return the tokens of both texts, and the number of those of the context."""
        return await self.encode(context + continuation), len(await self.encode(context))

    async def score(self, batch: list[tuple[list[int], int]]) -> tuple[list[tuple[float, bool]], int]:
        """Return log-likelihoods, whether each continuation is greedy, and the number of computed tokens."""
        body = {
            "model": "demo", "prompt": [tokens for tokens, _ in batch], "temperature": 0, "max_tokens": 1,
            "logprobs": 1, "seed": 1234, "echo": True,
        }  # fmt: skip
        answer = (await self._client.post("/v1/completions", json=body)).raise_for_status().json()
        scores = []
        for choice, (_, start) in zip(
            sorted(answer["choices"], key=lambda choice: choice["index"]), batch, strict=True
        ):
            logprobs = choice["logprobs"]["token_logprobs"][start:-1]
            tops = choice["logprobs"]["top_logprobs"][start:-1]
            greedy = all(value == max(top.values()) for value, top in zip(logprobs, tops, strict=True))
            scores.append((sum(logprobs), greedy))
        usage = answer["usage"]
        return scores, usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]


def write_task() -> list[tuple[str, str]]:
    """Return the contexts and continuations of three questions with four choices and two worked examples."""
    answers = list(trained_answers().items())[:60:5]
    texts = [
        f"{question}\n"
        + "".join(f"{letter}. {answers[(i + k) % len(answers)][1]}\n" for k, letter in enumerate(LETTERS))
        + "Answer:"
        for i, (question, _) in enumerate(answers[:5])
    ]
    examples = "".join(f"{text} A\n\n" for text in texts[:2])
    return [(examples + text, f" {letter}") for text in texts[2:] for letter in LETTERS]


@pytest.mark.parametrize("batch_size", [1, 8])
async def test_multiple_choice_task_runs_as_in_transformers(
    live_demo: Callable[..., Any], batch_size: int
) -> None:
    gateway = await live_demo(tokenizer_info=True)
    async with httpx.AsyncClient(timeout=120, base_url=gateway.url) as client:
        remote = RemoteModel(client)
        info = await remote.describe()
        assert await remote.encode(info["eos_token"])
        pairs = [await remote.encode_pair(*pair) for pair in write_task()]
        pairs.sort(key=lambda pair: (-len(pair[0]), pair[0]))
        assert await remote.decode(pairs[0][0]) in {"".join(pair) for pair in write_task()}
        scores: list[tuple[float, bool]] = []
        computed = 0
        for first in range(0, len(pairs), batch_size):
            batch, count = await remote.score(pairs[first : first + batch_size])
            scores += batch
            computed += count
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    for (value, greedy), pair in zip(scores, pairs, strict=True):
        expected, most_probable = score_continuation(model, *pair)
        assert value == pytest.approx(expected, abs=1e-3)
        assert greedy == most_probable
    assert 3 * computed <= sum(len(tokens) for tokens, _ in pairs)
