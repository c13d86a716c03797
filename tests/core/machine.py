# SPDX-License-Identifier: Apache-2.0
"""A Hypothesis state machine that applies random arrivals, aborts, launches and completions to a `World`."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from world import MakeScheduler, World, request

from mizzen.core.config import SchedulerConfig
from mizzen.core.request import Pooling
from mizzen.core.scheduler import Scheduler

BASES = ([1, 2, 1, 2] * 12, [1, 2, 1, 2, 5, 5] * 8, [7] * 48)

TICKS = st.sampled_from((0.0, 1e-4, 4e-3, 0.03, 0.5))
"""Values of `World.tick`: seconds that pass before each launch and before each completion."""

configs = st.builds(
    lambda page_size, tokens, **rest: SchedulerConfig(
        page_size=page_size, pages_total=max(tokens // page_size, 2), context_length=64, **rest
    ),
    page_size=st.sampled_from((1, 4, 16)),
    tokens=st.sampled_from((32, 48, 48, 80, 400)),
    max_running_requests=st.sampled_from((1, 3, 4, 5)),
    prefill_chunk_tokens=st.sampled_from((2, 5, 16, 40, 100)),
    max_step_milliseconds=st.sampled_from((None, 1.0, 1.0, 25.0)),
    end_token_ids=st.just((3,)),
    steps_in_flight=st.integers(1, 3),
    prefix_cache=st.sampled_from(("radix", "radix", "radix", "none")),
    eviction=st.sampled_from(("lru", "lfu", "fifo", "mru", "slru", "priority")),
    policy=st.sampled_from(("fcfs", "lpm", "dfs-weight", "priority", "priority")),
    reserve_tokens=st.sampled_from((0, 4)),
    max_waiting_requests=st.sampled_from((4, 100)),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Sends random events to the scheduler that `make` creates; `World` checks it after each event."""

    make: MakeScheduler = Scheduler
    """Constructor of the scheduler under test; subclasses set it to a mutant."""

    @initialize(config=configs, seconds=TICKS)
    def start(self, config: SchedulerConfig, seconds: float) -> None:
        self.world = World(config, type(self).make)
        self.world.tick = seconds
        self.rid = 0

    @rule(
        base=st.sampled_from(BASES),
        shared=st.sampled_from((0, 3, 4, 8, 9, 16, 17, 33, 48)),
        own=st.lists(st.integers(0, 11), max_size=8),
        max_tokens=st.sampled_from((1, 2, 8, 20, None)),
        stops=st.sampled_from(((), (5,), (6, 7, 8))),
        ignore_eos=st.booleans(),
        salt=st.sampled_from((b"", b"", b"tenant")),
        priority=st.sampled_from((-1, 0, 0, 2)),
    )
    def arrive(
        self,
        base: list[int],
        shared: int,
        own: list[int],
        max_tokens: int | None,
        stops: tuple[int, ...],
        ignore_eos: bool,
        salt: bytes,
        priority: int,
    ) -> None:
        self.rid += 1
        self.world.arrive(
            request(
                self.rid,
                base[:shared] + own,
                max_tokens=max_tokens,
                stop_token_ids=stops,
                ignore_eos=ignore_eos,
                salt=salt,
                priority=priority,
            )
        )

    @rule(
        base=st.sampled_from(BASES),
        shared=st.sampled_from((1, 8, 17, 33)),
        own=st.lists(st.integers(0, 11), max_size=8),
        generated=st.sampled_from((0, 0, 1, 3)),
        max_tokens=st.sampled_from((1, 4, 20)),
        min_tokens=st.sampled_from((0, 3, 10)),
        logprobs=st.sampled_from((None, 0, 2)),
        prompt_logprobs=st.sampled_from((None, None, 1)),
        first=st.sampled_from((0, 0, 1, 7, 99)),
    )
    def arrive_with_logprobs(
        self,
        base: list[int],
        shared: int,
        own: list[int],
        generated: int,
        max_tokens: int,
        min_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
        first: int,
    ) -> None:
        self.rid += 1
        prompt = base[:shared] + own
        generated = min(generated, len(prompt) - 1)
        self.world.arrive(
            request(
                self.rid,
                prompt,
                generated=generated,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                logprobs=logprobs,
                logprob_token_ids=() if logprobs is None else (5,),
                prompt_logprobs=prompt_logprobs,
                prompt_logprobs_from=min(first, len(prompt) - generated),
            )
        )

    @rule(base=st.sampled_from(BASES), length=st.integers(1, 40), pooling=st.sampled_from(tuple(Pooling)))
    def arrive_for_embedding(self, base: list[int], length: int, pooling: Pooling) -> None:
        self.rid += 1
        self.world.arrive(request(self.rid, base[:length], pooling=pooling))

    @precondition(lambda self: self.rid > 0)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.integers(1, self.rid)))

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.world.launch()
            if len(self.world.inflight) >= self.world.config.steps_in_flight:
                self.world.collect()

    @rule(seconds=TICKS)
    def change_step_time(self, seconds: float) -> None:
        self.world.tick = seconds

    @rule()
    def launch(self) -> None:
        self.world.launch()

    @rule()
    def collect(self) -> None:
        self.world.collect()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
