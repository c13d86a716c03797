# SPDX-License-Identifier: Apache-2.0
"""A prompt that begins like a recent one is scored only from where it differs, with the same response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from mizzen.gateway.engines.engine_table import EngineTable
from mizzen.gateway.requests.prompt_scores.scored_prompts import ScoredPrompts
from mizzen.gateway.routing.interfaces import ModelIdentity

pytestmark = pytest.mark.xdist_group("demo-engine")

CONTEXT = [20 + index % 90 for index in range(100)]


async def score(gateway: Any, prompt: list[int]) -> tuple[list[float], int]:
    """Return the log probabilities of a prompt's tokens from the second on, and the cached tokens."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 2}
    async with httpx.AsyncClient(timeout=60, base_url=gateway.url) as client:
        answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    values = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert len(values) == len(prompt) and values[0] is None
    return values[1:], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_scores_with_remembered_prefixes_equal_those_without(live_demo: Callable[..., Any]) -> None:
    gateway = await live_demo()
    [service] = gateway.gateway.services
    prompts = [[*CONTEXT, 5], [*CONTEXT, 6, 7], [*CONTEXT[:50], 8, 9], [*CONTEXT, 6, 7], [*CONTEXT, 6]]
    whole = []
    for prompt in prompts:
        service.scored_prompts = ScoredPrompts()
        values, cached = await score(gateway, prompt)
        assert cached == 0
        whole.append(values)
    service.scored_prompts = ScoredPrompts()
    for index, prompt in enumerate(prompts):
        values, cached = await score(gateway, prompt)
        assert values == pytest.approx(whole[index], abs=1e-3)
        assert (cached > 0) == (index > 0)


async def test_scores_of_a_model_that_was_replaced_meanwhile_are_not_used(
    live_demo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await live_demo()
    [service] = gateway.gateway.services
    first, _ = await score(gateway, [*CONTEXT, 5])
    before = ModelIdentity("before", "1", "")
    [(key, prompt)] = service.scored_prompts._entries
    entries = service.scored_prompts._entries[key, prompt]
    wrong = [type(entry)(entry.token, -1000.0, (), ()) for entry in entries]
    service.scored_prompts.add(type(key)(before, key.salt, key.top), prompt, wrong)
    monkeypatch.setattr(EngineTable, "find_sole_model", lambda table: before)
    values, _ = await score(gateway, [*CONTEXT, 5])
    assert values == pytest.approx(first, abs=1e-3)
