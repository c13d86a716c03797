# SPDX-License-Identifier: Apache-2.0
"""A new engine's cache is filled with the hottest prefixes before it serves, without delaying requests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.core.kv.block_hashes import BLOCK_TOKENS, block_hashes
from mizzen.gateway.engines.discovered_engine import DiscoveredEngine
from mizzen.gateway.routing.hot_prefixes import HALF_LIFE_SECONDS, HotPrefixes
from mizzen.wire.messages import RefusalCode

DEMO = Path(__file__).parents[3] / "models/demo"
HOT = "Mizzen serves language models on Kubernetes. " * 40


class Clock:
    """A clock whose time the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def prompt(*blocks: int) -> np.ndarray:
    """Return the token ids of a prompt; each of its blocks consists of one repeated number."""
    return np.repeat(np.array(blocks, np.int32), BLOCK_TOKENS)


def add(store: HotPrefixes, *blocks: int, salt: bytes = b"", times: int = 1) -> None:
    tokens = prompt(*blocks)
    for _ in range(times):
        store.count_prompt(tuple(block_hashes(tokens, salt)), tokens, salt)


def hottest_prompts(store: HotPrefixes, blocks: int) -> list[tuple[int, ...]]:
    return [
        tuple(prefix.tokens[::BLOCK_TOKENS].tolist()) for prefix in store.find_hottest(blocks * BLOCK_TOKENS)
    ]


def test_hottest_prefixes_are_those_of_most_prompts() -> None:
    store = HotPrefixes(100)
    add(store, 1, 2, 3, times=3)
    add(store, 1, 2, 4, times=2)
    add(store, 5, times=4)
    add(store, 6)
    assert hottest_prompts(store, 100) == [(5,), (1, 2, 3), (1, 2, 4)]
    assert hottest_prompts(store, 4) == [(5,), (1, 2, 3)]
    assert hottest_prompts(store, 3) == [(1, 2), (5,)]
    assert hottest_prompts(store, 1) == [(1,)]
    assert hottest_prompts(store, 0) == []


def test_prefix_weights_decay() -> None:
    clock = Clock()
    store = HotPrefixes(100, clock)
    add(store, 1, times=8)
    clock.now += 4 * HALF_LIFE_SECONDS
    add(store, 2, times=2)
    assert hottest_prompts(store, 1) == [(2,)]
    clock.now += 1000 * HALF_LIFE_SECONDS
    add(store, 3, times=2)
    assert hottest_prompts(store, 2) == [(3,), (2,)], "weights are divided before they are too large"


def test_equal_prompts_with_other_salts_are_distinct() -> None:
    store = HotPrefixes(100)
    add(store, 1, salt=b"a", times=2)
    add(store, 1, salt=b"b", times=3)
    assert [prefix.salt for prefix in store.find_hottest(1000)] == [b"b", b"a"]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(0, 3), st.booleans()),
        max_size=60,
    ),
    st.integers(1, 30),
    st.integers(0, 20),
)
def test_hot_prefixes_stay_whole_and_bounded(
    prompts: list[tuple[list[int], int, bool]], capacity: int, blocks: int
) -> None:
    clock = Clock()
    store = HotPrefixes(capacity, clock)
    seen: list[tuple[bytes, list[int]]] = []
    for given_blocks, halves, salted in prompts:
        clock.now += halves * HALF_LIFE_SECONDS
        salt = b"s" if salted else b""
        add(store, *given_blocks, salt=salt)
        seen.append((salt, given_blocks))
        assert len(store) <= capacity
    hottest = store.find_hottest(blocks * BLOCK_TOKENS)
    named = {name for prefix in hottest for name in prefix.block_hashes}
    assert len(named) <= blocks
    for prefix in hottest:
        assert tuple(block_hashes(prefix.tokens, prefix.salt)) == prefix.block_hashes
        begins = prefix.tokens[::BLOCK_TOKENS].tolist()
        assert sum(salt == prefix.salt and text[: len(begins)] == begins for salt, text in seen) > 1
        other_hashes = [other.block_hashes for other in hottest if other is not prefix]
        assert not any(other[: len(prefix.block_hashes)] == prefix.block_hashes for other in other_hashes)


class WarmGateway:
    """A gateway whose first engine has answered prompts with a hot prefix; a second engine can join."""

    def __init__(self, gateway: Any, first: Any) -> None:
        self.gateway, self.table = gateway, gateway.gateway.only_service.table
        self.first = DiscoveredEngine(name="first", uid="1", endpoint=first.endpoint)

    def join(self, second: Any, *, alone: bool = False) -> None:
        joined = DiscoveredEngine(name="second", uid="2", endpoint=second.endpoint)
        self.table.sync([joined] if alone else [self.first, joined])

    @property
    def state(self) -> str:
        return next((engine.state for engine in self.table if engine.name == "second"), "")

    def ended(self, result: str) -> bool:
        return (
            f'mizzen_gateway_warmups_total{{result="{result}"}} 1.0'
            in self.gateway.gateway.metrics_text().decode()
        )


@pytest.fixture
async def warmed(live: Any, scripted: Any, until: Any) -> WarmGateway:
    first = scripted()
    warmed_gateway = WarmGateway(await live(first, wait=False, warm_tokens=4096, warm_seconds=60.0), first)
    warmed_gateway.table.sync([warmed_gateway.first])
    await until(lambda: warmed_gateway.table.serving)
    for end in ("one", "two", "three"):
        await warmed_gateway.gateway.client().completions.create(model="demo", prompt=HOT + end, max_tokens=1)
    return warmed_gateway


async def test_hottest_prefix_is_replayed_before_the_first_request(
    warmed: WarmGateway, scripted: Any, until: Any
) -> None:
    second = scripted()
    warmed.join(second)
    await until(lambda: warmed.state == "serving")
    [replayed] = second.requests
    assert replayed.sampling.max_tokens == 1
    assert replayed.priority < 0
    assert len(replayed.prompt) % (4 * BLOCK_TOKENS) == 0
    assert len(replayed.prompt) > 4 * BLOCK_TOKENS
    assert warmed.ended("done")


async def test_failed_replay_does_not_delay_serving(warmed: WarmGateway, scripted: Any, until: Any) -> None:
    second = scripted()
    second.does.refuse = RefusalCode.QUEUE_FULL
    warmed.join(second)
    await until(lambda: warmed.state == "serving")
    assert warmed.ended("failed")


async def test_needed_engine_serves_at_once(warmed: WarmGateway, scripted: Any, until: Any) -> None:
    second = scripted()
    second.does.fault, second.does.fault_after = "mute", 0
    warmed.join(second)
    await until(lambda: warmed.state == "warming" and second.requests)
    warmed.join(second, alone=True)
    await until(lambda: warmed.state == "serving")
    assert warmed.ended("needed")


async def test_first_engine_is_not_warmed(live: Any, scripted: Any) -> None:
    gateway = await live(scripted(), warm_tokens=4096)
    metrics_text = gateway.gateway.metrics_text().decode()
    counted = re.findall(r"^mizzen_gateway_warmups_total{.*} (.*)$", metrics_text, re.MULTILINE)
    assert set(counted) == {"0.0"}


async def test_warmup_ends_at_its_time_limit(live: Any, scripted: Any, until: Any) -> None:
    first, second = scripted(), scripted()
    it = WarmGateway(await live(first, wait=False, warm_tokens=4096, warm_seconds=0.3), first)
    it.table.sync([it.first])
    await until(lambda: it.table.serving)
    for _ in range(2):
        await it.gateway.client().completions.create(model="demo", prompt=HOT, max_tokens=1)
    second.does.fault, second.does.fault_after = "mute", 0
    it.join(second)
    await until(lambda: it.state == "serving")
    assert it.ended("deadline")


async def test_first_request_hits_the_cache_of_a_warmed_real_engine(
    live: Any, until: Any, demo_engine: str, second_engine: str
) -> None:
    gateway = await live(demo_engine, wait=False, warm_tokens=4096, warm_seconds=60.0)
    table = gateway.gateway.only_service.table
    first = DiscoveredEngine(name="first", uid="1", endpoint=demo_engine)
    second = DiscoveredEngine(name="second", uid="2", endpoint=second_engine)
    table.sync([first])
    await until(lambda: table.serving)
    client = gateway.client(timeout=60)
    text = "What is a group? " * 30

    async def cached(end: str) -> int:
        answer = await client.completions.create(model="demo", prompt=text + end, max_tokens=1)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        return details.cached_tokens or 0 if details is not None else 0

    for end in ("one", "two"):
        await cached(end)
    table.sync([first, second])
    await until(lambda: all(engine.serving for engine in table) and len(table) == 2)
    table.sync([second])
    await until(lambda: len(table) == 1)
    assert await cached("three") >= BLOCK_TOKENS
