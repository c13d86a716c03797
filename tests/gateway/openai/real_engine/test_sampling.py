# SPDX-License-Identifier: Apache-2.0
"""Choices and sampling parameters of a real engine with the demo model."""

from __future__ import annotations

from typing import Any

import pytest

from demo_completions import DEMO_MODEL as MODEL
from demo_completions import USER, complete
from mizzen.gateway.text.tokenizer import Tokenizer

pytestmark = pytest.mark.xdist_group("demo-engine")


async def test_first_choice_uses_the_requests_seed_and_others_differ(client: Any) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "seed": 7}
    alone = await complete(client, **options)
    several = await complete(client, n=4, **options)
    repeated = await complete(client, n=4, **options)
    texts = [choice.text for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert texts == [choice.text for choice in repeated.choices]
    assert texts[0] == alone.choices[0].text
    assert len(set(texts)) > 1
    assert several.usage.prompt_tokens == alone.usage.prompt_tokens
    assert several.usage.completion_tokens == sum(
        len(ids) for ids in await token_ids_of_choices(client, n=4, **options)
    )


async def token_ids_of_choices(client: Any, **options: Any) -> list[list[int]]:
    answer = await complete(client, return_token_ids=True, **options)
    return [choice.model_extra["token_ids"] for choice in answer.choices]


async def test_streamed_choices_equal_unstreamed_ones(client: Any) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": USER, "max_tokens": 10, "seed": 3, "n": 3}
    full = await client.chat.completions.create(temperature=1.2, **options)
    stream = await client.chat.completions.create(
        temperature=1.2, stream=True, stream_options={"include_usage": True}, **options
    )
    texts, reasons, roles, usage = ["", "", ""], {}, [], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.index] if choice.delta.role else []
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in full.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in full.choices}
    assert sorted(roles) == [0, 1, 2]
    assert usage.completion_tokens == full.usage.completion_tokens
    assert usage.prompt_tokens == full.usage.prompt_tokens


async def test_batched_prompts_are_answered_like_separate_requests(client: Any, tokenizer: Tokenizer) -> None:
    prompts = ["Mizzen", "A pod is", "The gateway"]
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    alone = [await complete(client, prompt, **options) for prompt in prompts]
    together = await complete(client, prompts, n=2, **options)
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices] == [
        answer.choices[0].text for answer in alone for _ in range(2)
    ]
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    assert together.usage.completion_tokens == 2 * sum(answer.usage.completion_tokens for answer in alone)
    ids = await complete(client, [tokenizer.encode(prompt) for prompt in prompts], **options)
    assert [choice.text for choice in ids.choices] == [answer.choices[0].text for answer in alone]


async def test_best_of_returns_the_most_probable_choices(client: Any) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.8, "seed": 5, "logprobs": 0}
    every = await complete(client, n=6, **options)
    best = await complete(client, n=2, best_of=6, **options)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    most_probable = sorted(every.choices, key=mean, reverse=True)[:2]
    assert [choice.text for choice in best.choices] == [choice.text for choice in most_probable]
    assert best.usage.completion_tokens == every.usage.completion_tokens
    plain = await complete(client, n=1, best_of=6, **{**options, "logprobs": None})
    assert plain.choices[0].text == most_probable[0].text
    assert plain.choices[0].logprobs is None


async def test_sampling_fields_reach_the_engine(client: Any, tokenizer: Tokenizer) -> None:
    greedy = (await token_ids_of_choices(client, max_tokens=12, temperature=0))[0]
    first = greedy[0]
    assert (await token_ids_of_choices(client, max_tokens=12, temperature=2, top_k=1))[0] == greedy
    assert (await token_ids_of_choices(client, max_tokens=12, temperature=2, top_p=0))[0] == greedy
    assert (await token_ids_of_choices(client, max_tokens=12, temperature=2, min_p=1))[0] == greedy
    banned = (
        await token_ids_of_choices(client, max_tokens=12, temperature=0, logit_bias={str(first): -100})
    )[0]
    assert first not in banned
    other = tokenizer.encode("z", add_special_tokens=False)[0]
    forced = await token_ids_of_choices(client, max_tokens=3, temperature=1, logit_bias={str(other): 100})
    assert forced == [[other] * 3]
    with_penalties = await token_ids_of_choices(
        client,
        max_tokens=6,
        temperature=0,
        logit_bias={str(other): 10},
        presence_penalty=2,
        frequency_penalty=2,
    )
    freely = await token_ids_of_choices(client, max_tokens=6, temperature=0, logit_bias={str(other): 10})
    assert with_penalties[0].count(other) <= freely[0].count(other)
    long = await token_ids_of_choices(client, max_tokens=60, min_tokens=50, temperature=0)
    assert len(long[0]) >= 50


async def test_min_tokens_and_ignore_eos_continue_past_the_end_token(client: Any) -> None:
    chat: dict[str, Any] = {"model": "demo", "messages": USER, "temperature": 0, "max_tokens": 400}
    plain = await client.chat.completions.create(**chat)
    assert plain.choices[0].finish_reason == "stop"
    count = plain.usage.completion_tokens
    longer = await client.chat.completions.create(**chat, extra_body={"min_tokens": count + 5})
    assert longer.usage.completion_tokens >= count + 5
    assert longer.choices[0].message.content.startswith(plain.choices[0].message.content)
    endless = await client.chat.completions.create(
        **{**chat, "max_tokens": count + 20}, extra_body={"ignore_eos": True}
    )
    assert endless.choices[0].finish_reason == "length"
    assert endless.usage.completion_tokens == count + 20


async def test_special_tokens_are_in_the_text_if_requested(client: Any, tokenizer: Tokenizer) -> None:
    end = tokenizer.token_id("<|end|>")
    options: dict[str, Any] = {"max_tokens": 2, "logit_bias": {str(end): 100}, "ignore_eos": True}
    hidden = await complete(client, **options)
    shown = await complete(client, skip_special_tokens=False, **options)
    assert (hidden.choices[0].text, shown.choices[0].text) == ("", "<|end|><|end|>")


async def test_final_message_is_continued(client: Any) -> None:
    started = [*USER, {"role": "assistant", "content": "Mizzen serves"}]
    answer = await client.chat.completions.create(
        model="demo", messages=started, temperature=0, max_tokens=5,
        extra_body={"continue_final_message": True, "return_token_ids": True},
    )  # fmt: skip
    prompt = answer.model_extra["prompt_token_ids"]
    assert Tokenizer.load(MODEL).decode(prompt, False).endswith("Mizzen serves")
