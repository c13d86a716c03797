# SPDX-License-Identifier: Apache-2.0
"""The prefix index and the circuit breaker, each compared with a model; memory of the prefix index."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mizzen.core.kv.block_hashes import block_hashes
from mizzen.gateway.engines.circuit_breaker import BreakerLimits, BreakerState, CircuitBreaker
from mizzen.gateway.routing.prefix_index import BLOCK_BYTES, GUESS_SECONDS, EnginePrefixes, PrefixBudget
from mizzen.server.simulate import SimulatedEngine
from mizzen.server.simulate_config import SimulateConfig
from mizzen.wire.messages import PROTOCOL, Hello

NAMES = st.lists(st.integers(0, 40), max_size=12, unique=True)
CAPACITY = 24


class IndexMachine(RuleBasedStateMachine):
    """Applies random cache events, guesses and resets to an index and to a model of it.

    The model consists of a set of stored blocks and a deadline for each guessed block. The index equals the
    model until it is full and evicts blocks. From then on, it contains a subset of the model's blocks, within
    its capacity, and this subset includes the most recently used blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.index = EnginePrefixes(CAPACITY, clock=lambda: self.now)
        self.stored: set[int] = set()
        self.guessed: dict[int, float] = {}

    @rule(stored=NAMES, evicted=NAMES)
    def event(self, stored: list[int], evicted: list[int]) -> None:
        evicted = [name for name in evicted if name not in stored]
        self.index.apply_event(stored, evicted)
        self.stored = (self.stored - set(evicted)) | set(stored)
        for name in (*stored, *evicted):
            self.guessed.pop(name, None)
        self.newest(stored)

    @rule(stored=NAMES)
    def reset(self, stored: list[int]) -> None:
        self.index.apply_event(stored, (), reset=True)
        self.stored, self.guessed = set(stored), {}
        self.newest(stored)

    @rule(names=NAMES)
    def guess(self, names: list[int]) -> None:
        believed = {name for name in names if name in self.index._blocks}
        self.index.add_guesses(names)
        for name in names:
            if name not in self.stored or name not in believed:
                self.guessed[name] = self.now + GUESS_SECONDS
        self.newest(names)

    @rule(names=NAMES)
    def doubt(self, names: list[int]) -> None:
        self.index.retract_guesses(names)
        for name in names:
            self.guessed.pop(name, None)

    @rule(seconds=st.floats(0.1, 40))
    def later(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def lost(self) -> None:
        self.index.clear()
        self.stored, self.guessed = set(), {}

    def held(self, name: int) -> bool:
        return name in self.stored or self.guessed.get(name, 0.0) > self.now

    def newest(self, names: list[int]) -> None:
        """Check that the first blocks of a prefix that was just used are in the index."""
        assert self.index.match_prefix(names[: CAPACITY // 2]) == len(names[: CAPACITY // 2])

    @invariant()
    def bounded(self) -> None:
        assert len(self.index) <= CAPACITY

    @invariant()
    def equal_to_the_model(self) -> None:
        for name in range(41):
            matched = self.index.match_prefix([name]) == 1
            if not self.index.evicted_blocks:
                assert matched == self.held(name)
            elif matched:
                assert self.held(name)

    @invariant()
    def matches_from_the_start(self) -> None:
        names = random.Random(len(self.index)).sample(range(41), 10)
        expected = next(
            (i for i, name in enumerate(names) if self.index.match_prefix([name]) == 0), len(names)
        )
        assert self.index.match_prefix(names) == expected


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestIndex = IndexMachine.TestCase


def test_prefix_index_memory_per_block_and_bound() -> None:
    """An index that receives too many blocks stays within its limits of size and of memory per block."""
    draw, blocks = random.Random(3), 40_000
    gc.collect()
    tracemalloc.start()
    try:
        index, worst = EnginePrefixes(blocks), 0.0
        bytes_before = tracemalloc.get_traced_memory()[0]
        for _ in range(120):
            names = [draw.getrandbits(64) for _ in range(1000)]
            index.apply_event(names, names[:100])
            index.add_guesses(names[100:200])
            del names
            used = tracemalloc.get_traced_memory()[0] - bytes_before
            if len(index) > blocks // 2:
                worst = max(worst, used / blocks)
        assert len(index) <= blocks
        assert index.evicted_blocks > 0
        assert worst <= BLOCK_BYTES
    finally:
        tracemalloc.stop()


def test_engines_share_one_prefix_budget() -> None:
    budget, engines = PrefixBudget(1000), [EnginePrefixes() for _ in range(4)]
    for engine in engines:
        engine.apply_event(list(range(900)), ())
    budget.divide(engines[:1])
    assert len(engines[0]) == 900
    budget.divide(engines)
    assert sum(len(engine) for engine in engines) <= 1000
    assert all(engine.match_prefix(list(range(100))) == 100 for engine in engines), (
        "first blocks stay longest"
    )


async def test_prefix_index_follows_cache_events_of_an_engine(
    live: Any, model_folder: Path, until: Any
) -> None:
    """The events come from a real radix cache with evictions; old, new and reconnected gateways agree."""
    options = {"kv_cache_tokens": 4096, "step_milliseconds": 1.0, "drain_timeout_seconds": 0.2}
    config = SimulateConfig(
        model=str(model_folder), served_name="demo", wire_bind="tcp://127.0.0.1:*", **options
    )

    def blocks_agree(gateway: Any) -> set[int]:
        (engine,) = gateway.gateway.table
        return {name for name, until in engine.prefixes._blocks.items() if until is None}

    draw = random.Random(5)
    shared = [draw.randrange(5, 400) for _ in range(200)]
    with SimulatedEngine(config) as engine:
        gateways = [await live(engine.endpoint) for _ in range(2)]

        async def ask(number: int) -> None:
            own = [draw.randrange(5, 400) for _ in range(draw.randrange(20, 600))]
            client = gateways[number % 2].client()
            await client.completions.create(model="demo", prompt=shared + own, max_tokens=8)

        for _ in range(6):
            await asyncio.gather(*(ask(number) for number in range(8)))
        (link,) = [engine_entry.link for engine_entry in gateways[0].gateway.table]
        link._send(Hello(PROTOCOL, "again"))  # the engine reports all its blocks again
        await asyncio.gather(*(ask(number) for number in range(4)))
        new_gateway = await live(engine.endpoint)
        await until(
            lambda: (
                blocks_agree(new_gateway)
                and blocks_agree(new_gateway) == blocks_agree(gateways[0]) == blocks_agree(gateways[1])
            )
        )
        blocks = tuple(block_hashes(np.array(shared, dtype=np.int32)))
        assert set(blocks) <= blocks_agree(new_gateway), "what all requests share was in use to the end"
        assert len(blocks_agree(new_gateway)) <= 4096 // 64


class BreakerMachine(RuleBasedStateMachine):
    """Applies random requests and outcomes to a circuit breaker; compares it with a model of its rules."""

    LIMITS = BreakerLimits(failures=3, seconds=1.0, max_seconds=5.0, probes=2)

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.breaker = CircuitBreaker(self.LIMITS, clock=lambda: self.now)
        self.running: list[tuple[int, int]] = []
        self.era = 0
        self.failures = 0
        self.open_until: float | None = None
        self.pause = 1.0

    @property
    def state(self) -> BreakerState:
        if self.open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self.now < self.open_until else BreakerState.HALF_OPEN

    @property
    def probes(self) -> int:
        return sum(era == self.era for era, _ in self.running)

    @precondition(lambda self: self.breaker.allows)
    @rule()
    def send(self) -> None:
        self.running.append((self.era, self.breaker.begin_request()))

    @precondition(lambda self: self.running)
    @rule(
        index=st.integers(0, 10**6),
        outcome=st.sampled_from(["record_success", "record_failure", "record_failure", "cancel_request"]),
    )
    def end(self, index: int, outcome: str) -> None:
        era, token = self.running.pop(index % len(self.running))
        state = self.state
        getattr(self.breaker, outcome)(token)
        if era != self.era or outcome == "cancel_request":
            return
        if outcome == "record_success":
            self.failures = 0
            if state is not BreakerState.CLOSED:
                self.open_until, self.pause = None, 1.0
            return
        self.failures += 1
        if state is not BreakerState.CLOSED:
            self.pause = min(2 * self.pause, 5.0)
        elif self.failures < 3:
            return
        self.open_until = self.now + self.pause
        self.era += 1

    @rule(seconds=st.floats(0.05, 3))
    def later(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def another_process(self) -> None:
        self.breaker.reset()
        self.era, self.failures, self.open_until, self.pause = self.era + 1, 0, None, 1.0

    @invariant()
    def as_the_rules_say(self) -> None:
        assert self.breaker.state is self.state
        allowed = {
            BreakerState.CLOSED: True,
            BreakerState.OPEN: False,
            BreakerState.HALF_OPEN: self.probes < 2,
        }
        assert self.breaker.allows == allowed[self.state]
        remaining = 0.0 if self.open_until is None else max(0.0, self.open_until - self.now)
        assert self.breaker.remaining_seconds == remaining


BreakerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestBreaker: Any = BreakerMachine.TestCase
