# SPDX-License-Identifier: Apache-2.0
"""Prompts of one request that begin alike: which prefixes are scored once, and how they are joined."""

from __future__ import annotations

import random
from array import array
from typing import Any

import msgspec
import pytest

from mizzen.gateway.errors import ApiError
from mizzen.gateway.openai.parse import RequestParser
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.prompt_scores.shared_prefixes import (
    MIN_SHARED_TOKENS,
    find_shared_prefixes,
    order_sources_first,
)

QUESTION = list(range(100, 150))
OTHER = list(range(200, 300))


def parse(**fields: Any) -> GenerationRequest:
    body = {"model": "m", "echo": True, "logprobs": 1, "max_tokens": 1, **fields}
    return RequestParser().parse_completion(msgspec.json.encode(body))


def test_prefixes_are_shared_with_the_prompt_that_has_most_in_common() -> None:
    prompts = [[*QUESTION, 1, 2], OTHER, [*QUESTION, 1, 3, 4], [*OTHER[:40], 7], QUESTION]
    shared = find_shared_prefixes([array("i", prompt) for prompt in prompts])
    assert len(shared) == 3
    for index, prefix in shared.items():
        assert prompts[index][: prefix.tokens] == prompts[prefix.source][: prefix.tokens]
    assert sorted(prefix.tokens for prefix in shared.values()) == [40, 50, 51]


def test_texts_and_short_prefixes_are_not_shared() -> None:
    short = list(range(MIN_SHARED_TOKENS - 1))
    assert not find_shared_prefixes([array("i", [*short, 1000]), array("i", [*short, 1001])])
    assert not find_shared_prefixes(["a" * 100, "a" * 100, array("i", QUESTION)])


def test_random_prompts_have_sources_without_cycles() -> None:
    rng = random.Random(4)
    prompts = [
        array("i", [7] * rng.choice([40, 60, 80]) + rng.choices(range(2**31 - 1), k=5)) for _ in range(60)
    ]
    shared = find_shared_prefixes([*prompts, *prompts[:9]])
    assert len(shared) == len(prompts) + 9 - 1
    sources = [prefix.source if (prefix := shared.get(index)) else None for index in range(len(prompts) + 9)]
    ordered = order_sources_first(sources)
    complete = {index for index, source in enumerate(sources) if source is None}
    for index, source in ordered:
        assert source in complete
        complete.add(index)
    assert len(complete) == len(sources)


def test_requests_ask_only_for_logprobs_after_the_shared_prefix() -> None:
    generation = parse(prompt=[[*QUESTION, 1], [*QUESTION, 2], [*QUESTION, 3]])
    starts = [request.sampling.prompt_logprobs_from for request in generation.split_sequences()]
    assert sorted(starts) == [0, 50, 50]
    for changes in ({"stream": True}, {"echo": False}, {"logprobs": None}, {"best_of": 2, "n": 2}):
        requests = parse(prompt=[[*QUESTION, 1], [*QUESTION, 2]], **changes).split_sequences()
        assert {request.sampling.prompt_logprobs_from for request in requests} == {0}


def test_a_start_after_the_shared_prefix_stays() -> None:
    requests = parse(prompt=[[*QUESTION, 1], [*QUESTION, 2]], prompt_logprobs_from=50).split_sequences()
    assert [request.sampling.prompt_logprobs_from for request in requests] == [50, 50]
    assert [request.logprobs_source for request in requests] == [None, None]


@pytest.mark.parametrize("fields", [{"echo": False}, {"logprobs": None}, {"logprobs": False}])
def test_a_start_needs_echo_and_logprobs(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="prompt_logprobs_from needs echo and logprobs"):
        parse(prompt="a", prompt_logprobs_from=3, **fields)
