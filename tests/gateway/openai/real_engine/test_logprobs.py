# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of a real engine with the demo model, with and without echo."""

from __future__ import annotations

import math
from typing import Any

import pytest

from demo_completions import PROMPT, USER, complete
from mizzen.gateway.text.tokenizer import Tokenizer

pytestmark = pytest.mark.xdist_group("demo-engine")


async def test_chat_logprobs_describe_the_answer(client: Any, tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": USER, "temperature": 0, "max_tokens": 10}
    answer = await client.chat.completions.create(logprobs=True, top_logprobs=4, **options)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert b"".join(bytes(token.bytes) for token in content).decode() == answer.choices[0].message.content
    for token in content:
        assert len(token.top_logprobs) == 4
        values = [top.logprob for top in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-5
        assert token.logprob == pytest.approx(values[0], abs=1e-6)  # greedy selects the most probable token
    bare = await client.chat.completions.create(logprobs=True, **options)
    assert all(token.top_logprobs == [] for token in bare.choices[0].logprobs.content)
    stream = await client.chat.completions.create(logprobs=True, top_logprobs=4, stream=True, **options)
    streamed = [
        token
        async for chunk in stream
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    assert [(token.token, token.logprob) for token in streamed] == [
        (token.token, token.logprob) for token in content
    ]


async def test_completion_logprobs_describe_answer_and_echo(client: Any, tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "logprobs": 3}
    plain = (await complete(client, **options)).choices[0]
    echoed = (await complete(client, echo=True, return_token_ids=True, **options)).choices[0]
    prompt = tokenizer.encode(PROMPT)
    assert echoed.model_extra["prompt_token_ids"] == prompt
    assert echoed.text == PROMPT + plain.text
    count = len(prompt)
    logprobs = echoed.logprobs
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.token_logprobs) == count + 6
    assert logprobs.tokens[count:] == plain.logprobs.tokens
    assert logprobs.token_logprobs[count:] == pytest.approx(plain.logprobs.token_logprobs, abs=2e-2)
    for token, offset in list(zip(logprobs.tokens, logprobs.text_offset, strict=True))[1:]:
        assert echoed.text[offset:].startswith(token)
    for token, top in list(zip(logprobs.tokens, logprobs.top_logprobs, strict=True))[1:]:
        assert 3 <= len(top) <= 4
        assert token in top


async def test_prompt_logprobs_equal_logprobs_of_generating_the_tokens(
    client: Any, tokenizer: Tokenizer
) -> None:
    """A prompt token has the log probability that it would have as an output after the preceding tokens."""
    greedy = (await complete(client, temperature=0, max_tokens=5, logprobs=0, return_token_ids=True)).choices[
        0
    ]
    full = tokenizer.encode(PROMPT) + greedy.model_extra["token_ids"]
    echoed = (await complete(client, full, echo=True, max_tokens=1, logprobs=0)).choices[0]
    prompt_logprobs = echoed.logprobs.token_logprobs[len(full) - 5 : len(full)]
    assert prompt_logprobs == pytest.approx(greedy.logprobs.token_logprobs, abs=2e-2)


async def test_max_tokens_zero_with_echo_scores_the_prompt(client: Any, tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"echo": True, "logprobs": 2, "temperature": 0}
    alone, longer = [(await complete(client, max_tokens=most, **options)).choices[0] for most in (0, 1)]
    count = len(tokenizer.encode(PROMPT))
    assert (alone.text, alone.finish_reason) == (PROMPT, "length")
    assert alone.logprobs.tokens == longer.logprobs.tokens[:count]
    assert len(alone.logprobs.top_logprobs) == len(alone.logprobs.text_offset) == count
    assert alone.logprobs.token_logprobs[1:] == pytest.approx(
        longer.logprobs.token_logprobs[1:count], abs=2e-2
    )


async def test_echo_is_streamed_first(client: Any) -> None:
    stream = await complete(client, echo=True, stream=True, temperature=0, max_tokens=4, n=2)
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    full = await complete(client, echo=True, temperature=0, max_tokens=4)
    assert texts == [full.choices[0].text] * 2


async def test_every_echoed_choice_has_prompt_logprobs(client: Any) -> None:
    options: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 1, "seed": 3}
    alone = (await complete(client, **options)).choices[0].logprobs
    several = await complete(client, n=3, **options)
    count = len(alone.tokens) - 2
    for choice in several.choices:
        assert choice.logprobs.tokens[:count] == alone.tokens[:count]
        assert choice.logprobs.token_logprobs[1:count] == pytest.approx(
            alone.token_logprobs[1:count], abs=2e-2
        )


async def test_streamed_logprobs_join_to_unstreamed_ones(client: Any) -> None:
    options: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 8, "temperature": 0}
    full = (await complete(client, "Größe 世界", **options)).choices[0]
    joined: dict[str, list[Any]] = {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
    text = ""
    async for chunk in await complete(client, "Größe 世界", stream=True, **options):
        text += chunk.choices[0].text
        for name, values in joined.items():
            values += getattr(chunk.choices[0].logprobs, name)
    assert text == full.text
    assert joined["tokens"] == full.logprobs.tokens
    assert joined["text_offset"] == full.logprobs.text_offset
    assert joined["token_logprobs"][1:] == pytest.approx(full.logprobs.token_logprobs[1:], abs=2e-2)
    assert any(name.startswith("bytes:\\x") for name in full.logprobs.tokens)


async def test_logprobs_can_name_tokens_by_id(client: Any) -> None:
    answer = await complete(
        client,
        temperature=0,
        max_tokens=3,
        logprobs=1,
        return_tokens_as_token_ids=True,
        return_token_ids=True,
    )
    choice = answer.choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.model_extra["token_ids"]]


async def test_prompt_logprobs_from_scores_only_the_suffix(post: Any, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT) * 10
    options = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    _, whole = await post("/v1/completions", **options)
    status, suffix = await post("/v1/completions", **options, prompt_logprobs_from=20)
    assert status == 200, suffix
    expected, scored = whole["choices"][0]["logprobs"], suffix["choices"][0]["logprobs"]
    assert scored["tokens"] == expected["tokens"]
    assert scored["text_offset"] == expected["text_offset"]
    assert scored["token_logprobs"][:20] == scored["top_logprobs"][:20] == [None] * 20
    assert scored["token_logprobs"][20:] == pytest.approx(expected["token_logprobs"][20:], abs=2e-2)
    assert suffix["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    status, error = await post("/v1/completions", **options, prompt_logprobs_from=len(prompt) + 1)
    assert (status, error["error"]["param"]) == (400, "prompt_logprobs_from")


async def test_continuations_of_a_harness_compute_their_prefix_once(post: Any, tokenizer: Tokenizer) -> None:
    """lm-evaluation-harness sends the prompts of a question's answers as one batch of token ids."""
    question = (tokenizer.encode(PROMPT) * 50)[:190]
    answers = [
        tokenizer.encode(text, add_special_tokens=False) for text in (" a mast", " two", " sails", " x")
    ]
    prompts = [question + answer for answer in answers]
    options = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    alone = [await post("/v1/completions", prompt=[prompt], **options) for prompt in prompts]
    status, batch = await post("/v1/completions", prompt=prompts, **options)
    assert status == 200, batch
    for (_, single), choice in zip(alone, batch["choices"], strict=True):
        expected = single["choices"][0]["logprobs"]
        assert choice["logprobs"]["tokens"] == expected["tokens"]
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
            expected["token_logprobs"][1:], abs=2e-2
        )
    computed = [
        usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        for usage in (*(single["usage"] for _, single in alone), batch["usage"])
    ]
    assert 3 * computed[-1] <= sum(computed[:-1])
