"""A scheduler, a simulated device and the properties that hold between them after every event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from mizzen.core.config import SchedulerConfig
from mizzen.core.events import Abort, Arrive, Event
from mizzen.core.output import StepOutput
from mizzen.core.params import SamplingParams
from mizzen.core.plan import StepPlan
from mizzen.core.request import Finished, FinishReason, Request
from mizzen.core.scheduler import Scheduler
from mizzen.engine.simulated import Context, FenceGuard, SimulatedDevice, hashed

VOCABULARY = 12
END_TOKEN = 3
SCRIPT = hashed(VOCABULARY)

MakeScheduler = Callable[[SchedulerConfig], Scheduler]


def request(rid: int, prompt: list[int], **sampling: object) -> Request:
    salt = bytes(sampling.pop("salt", b""))  # type: ignore[call-overload]
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Request(rid=rid, prompt=np.array(prompt, np.int32), sampling=params, seed=rid, salt=salt)


def run_alone(asked: Request, capacity: int) -> tuple[list[int], FinishReason]:
    """Return what a request gets when it has a device to itself."""
    params = asked.sampling
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {END_TOKEN})
    tokens = asked.prompt.tolist()
    limit = min(len(tokens) + (params.max_tokens or capacity), capacity)
    while len(tokens) < limit:
        tokens.append(SCRIPT(Context(np.array(tokens, np.int32), 0, params, asked.seed)))
        if tokens[-1] in stops:
            return tokens[len(asked.prompt) :], FinishReason.STOP
    return tokens[len(asked.prompt) :], FinishReason.LENGTH


class World:
    """Executes plans as a device would, and checks everything that comes back."""

    def __init__(self, config: SchedulerConfig, make: MakeScheduler = Scheduler) -> None:
        self.config = config
        self.scheduler = make(config)
        sizes = {
            "slots": config.max_running_requests,
            "page_size": config.page_size,
            "context_length": config.capacity_tokens,
        }
        self.device = SimulatedDevice(**sizes, pages=config.pages_total, script=SCRIPT)
        self.guard = FenceGuard(**sizes)
        self.flying: deque[StepPlan] = deque()
        self.events: list[Event] = []
        self.requests: dict[int, Request] = {}
        self.output: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.plans: list[StepPlan] = []
        self.aborted: set[int] = set()
        self.blocks: set[int] = set()

    def arrive(self, asked: Request) -> None:
        self.requests[asked.rid] = asked
        self.output[asked.rid] = []
        self.events.append(Arrive(asked))

    def abort(self, rid: int) -> None:
        self.events.append(Abort(rid))
        if rid in self.requests and rid not in self.finished:
            self.aborted.add(rid)

    def launch(self) -> StepPlan | None:
        events, self.events = self.events, []
        plan = self.scheduler.next(events, 0.0)
        self._take_ended()
        for rid in self.aborted:
            assert rid in self.finished, f"the abort of {rid} is not answered"
        if plan is not None:
            self.flying.append(plan)
            self.guard.launch(plan)
            self.plans.append(plan)
        self.check()
        return plan

    def collect(self) -> StepOutput | None:
        if not self.flying:
            return None
        plan = self.flying.popleft()
        tokens = self.device.execute(plan)
        self.guard.land()
        output = self.scheduler.complete(tokens, 0.0)
        for rid, offset, token in zip(
            output.rids.tolist(), output.offsets.tolist(), output.tokens.tolist(), strict=True
        ):
            assert rid not in self.finished, f"request {rid} got a token after its end"
            assert offset == len(self.output[rid]), f"request {rid} has a gap or a repetition"
            self.output[rid].append(token)
        for end in output.finished:
            self._finish(end)
        self._take_ended()
        self.check()
        return output

    def drain_running(self) -> None:
        """Run until all requests have ended; each must, within a bounded number of steps."""
        tokens = sum(len(asked.prompt) + self.config.capacity_tokens for asked in self.requests.values())
        for _ in range(20 * tokens + 50):
            launched = self.launch()
            if len(self.flying) < self.config.steps_in_flight and launched is not None:
                continue
            if self.collect() is None and launched is None:
                break
        assert not self.scheduler.has_work, "some request waits for ever"

    def drain(self) -> None:
        """Run until all requests have ended, and look at what each got and at what is left."""
        self.drain_running()
        assert set(self.finished) == set(self.requests)
        for rid, asked in self.requests.items():
            self._check_output(asked, self.finished[rid])
        self._check_empty()

    def check(self) -> None:
        faults = self.scheduler.check_integrity()
        assert not faults, faults
        assert self.scheduler.load().running <= self.config.max_running_requests
        events = self.scheduler.take_cache_events()
        assert not self.blocks & set(events.stored)
        assert self.blocks >= set(events.evicted)
        self.blocks = (self.blocks | set(events.stored)) - set(events.evicted)
        assert self.blocks == set(self.scheduler.cache_snapshot())

    def _finish(self, end: Finished) -> None:
        assert end.rid not in self.finished, f"request {end.rid} ended twice"
        assert end.output_tokens == len(self.output[end.rid]), f"request {end.rid}: tokens are missing"
        self.finished[end.rid] = end

    def _take_ended(self) -> None:
        for end in self.scheduler.take_ended():
            self._finish(end)

    def _check_output(self, asked: Request, end: Finished) -> None:
        tokens, reason = run_alone(asked, self.config.capacity_tokens)
        got = self.output[asked.rid]
        assert end.prompt_tokens == len(asked.prompt)
        assert 0 <= end.cached_tokens <= self._cacheable(asked)
        if end.reason is FinishReason.ERROR:
            assert end.message
            assert not got
        elif end.reason is FinishReason.ABORT:
            assert asked.rid in self.aborted
            assert got == tokens[: len(got)]
        else:
            assert (got, end.reason) == (tokens, reason), f"request {asked.rid} differs from itself run alone"
            assert end.stop_token == (tokens[-1] if reason is FinishReason.STOP else None)

    def _cacheable(self, asked: Request) -> int:
        """Return how many prompt tokens other requests under the same salt may have left in the cache."""
        prompt, most = asked.prompt.tolist(), 0
        for other in self.requests.values():
            if other.rid == asked.rid or other.salt != asked.salt:
                continue
            tokens = other.prompt.tolist() + self.output[other.rid]
            shared = next((i for i, (a, b) in enumerate(zip(prompt, tokens, strict=False)) if a != b), None)
            most = max(most, min(len(prompt), len(tokens)) if shared is None else shared)
        return min(most, max(len(prompt) - 1, 0))

    def _check_empty(self) -> None:
        memory = self.scheduler.memory
        assert memory.available == memory.pool.total, "pages stay held when nothing runs"
        for pages in memory.cache.evict(memory.pool.total):
            memory.pool.give(pages)
        assert sorted(memory.pool.free_pages().tolist()) == list(range(memory.pool.total))
        assert not self.scheduler.cache_snapshot()
