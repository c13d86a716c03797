# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of recent prompts are found by the longest common prefix, within bounds."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from mizzen.gateway.requests.prompt_scores.scored_prompts import (
    MAX_ALIKE,
    ScoredPrompts,
    ScoreKey,
)
from mizzen.gateway.requests.prompt_scores.shared_prefixes import MIN_SHARED_TOKENS
from mizzen.gateway.routing.interfaces import ModelIdentity
from mizzen.wire.client.stream import TokenLogprobs

MODEL = ModelIdentity("m", "r", "t")
KEY = ScoreKey(MODEL, b"", 1)
CONTEXT = list(range(100, 100 + MIN_SHARED_TOKENS))


def encode(prompt: Sequence[int]) -> bytes:
    return array("i", prompt).tobytes()


def score(prompt: Sequence[int]) -> list[TokenLogprobs]:
    """Return entries that depend on all tokens up to their own, as log probabilities do."""
    return [TokenLogprobs(token, float(sum(prompt[: i + 2])), (), ()) for i, token in enumerate(prompt[1:])]


def test_the_longest_common_prefix_of_random_prompts_is_found() -> None:
    rng = random.Random(0)
    scored, kept = ScoredPrompts(), []
    for _ in range(MAX_ALIKE):
        prompt = [*CONTEXT, *rng.choices(range(3), k=rng.randrange(6))]
        wanted = max((count_common(prompt, other) for other in kept), default=0)
        found = scored.find_prefix(KEY, encode(prompt))
        assert (0 if found is None else found.tokens) == wanted
        assert found is None or list(found.entries) == score(prompt)[: wanted - 1]
        scored.add(KEY, encode(prompt), score(prompt))
        kept.append(prompt)


def count_common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


@pytest.mark.parametrize(
    "other",
    [
        ScoreKey(MODEL, b"salt", 1),
        ScoreKey(MODEL, b"", 2),
        ScoreKey(ModelIdentity("m", "r2", "t"), b"", 1),
    ],
)
def test_tenants_models_and_numbers_of_alternatives_share_nothing(other: ScoreKey) -> None:
    scored = ScoredPrompts()
    scored.add(KEY, encode(CONTEXT), score(CONTEXT))
    assert scored.find_prefix(KEY, encode([*CONTEXT, 1])) is not None
    assert scored.find_prefix(other, encode([*CONTEXT, 1])) is None


def test_short_prompts_are_not_kept() -> None:
    scored = ScoredPrompts()
    scored.add(KEY, encode(CONTEXT[:-1]), score(CONTEXT[:-1]))
    assert scored.find_prefix(KEY, encode(CONTEXT)) is None


def test_the_least_recently_used_prompts_are_dropped() -> None:
    size = 2 * (len(CONTEXT) - 1)
    scored = ScoredPrompts(max_values=4 * size)
    prompts = [[number, *CONTEXT[1:]] for number in range(6)]
    for prompt in prompts[:4]:
        scored.add(KEY, encode(prompt), score(prompt))
    assert scored.find_prefix(KEY, encode(prompts[0])) is not None
    for prompt in prompts[4:]:
        scored.add(KEY, encode(prompt), score(prompt))
    kept = [number for number in range(6) if scored.find_prefix(KEY, encode(prompts[number]))]
    assert kept == [0, 3, 4, 5]


def test_only_some_prompts_with_the_same_beginning_are_kept() -> None:
    scored = ScoredPrompts()
    for number in range(MAX_ALIKE + 1):
        scored.add(KEY, encode([*CONTEXT, number]), score([*CONTEXT, number]))
    first, last = (scored.find_prefix(KEY, encode([*CONTEXT, number])) for number in (0, MAX_ALIKE))
    assert first is not None and first.tokens == len(CONTEXT)
    assert last is not None and last.tokens == len(CONTEXT) + 1
