"""A scheduler, a simulated device and the properties that hold between them after every event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from mizzen.core.config import SchedulerConfig
from mizzen.core.events import Abort, Arrive, Event
from mizzen.core.kv.integrity import find_integrity_faults
from mizzen.core.outputs import StepOutput
from mizzen.core.request import Finished, FinishReason, Pooling, Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.scheduler import Scheduler
from mizzen.core.step_plan import StepPlan
from mizzen.engine.simulated.engine import InflightUseGuard, ScriptContext, SimulatedDevice, hashed
from mizzen.engine.simulated.side_outputs import hidden_states

VOCABULARY = 12
END_TOKEN = 3
SCRIPT = hashed(VOCABULARY)

MakeScheduler = Callable[[SchedulerConfig], Scheduler]


def request(rid: int, prompt: list[int], **sampling: object) -> Request:
    own = {
        name: sampling.pop(name) for name in ("salt", "generated", "pooling", "priority") if name in sampling
    }
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Request(rid=rid, prompt=np.array(prompt, np.int32), sampling=params, seed=rid, **own)  # type: ignore[arg-type]


def embedding(asked: Request) -> np.ndarray:
    """Return the vector of a request for one, token by token."""
    states = [hidden_states(asked.prompt, i)[0] for i in range(len(asked.prompt))]
    pooled = states[-1] if asked.pooling is Pooling.LAST else np.mean(states, axis=0)
    return pooled / np.linalg.norm(pooled)


def run_alone(asked: Request, capacity: int) -> tuple[list[int], FinishReason]:
    """Return what a request gets when it has a device to itself."""
    params = asked.sampling
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {END_TOKEN})
    tokens = asked.prompt.tolist()
    first = len(tokens) - asked.generated
    limit = min(first + (params.max_tokens or capacity), capacity)
    while len(tokens) < limit:
        token = SCRIPT(ScriptContext(np.array(tokens, np.int32), first, params, asked.seed))
        while token in stops and len(tokens) - first < params.min_tokens:
            token = (token + 1) % VOCABULARY
        tokens.append(token)
        if token in stops:
            return tokens[first:], FinishReason.STOP
    return tokens[first:], FinishReason.LENGTH


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
        self.device = SimulatedDevice(**sizes, pages=config.pages_total, script=SCRIPT, vocab_size=VOCABULARY)
        self.guard = InflightUseGuard(**sizes)
        self.flying: deque[StepPlan] = deque()
        self.events: list[Event] = []
        self.requests: dict[int, Request] = {}
        self.output: dict[int, list[int]] = {}
        self.reported: dict[int, list[int]] = {}
        """The tokens whose log probabilities came, by request."""
        self.prompts_reported: dict[int, list[int]] = {}
        self.vectors: dict[int, np.ndarray] = {}
        self.finished: dict[int, Finished] = {}
        self.plans: list[StepPlan] = []
        self.aborted: set[int] = set()
        self.blocks: set[int] = set()
        self.now = 0.0
        self.tick = 0.0
        """Seconds that pass before each launch and before each completion."""

    def arrive(self, asked: Request) -> None:
        self.requests[asked.rid] = asked
        self.output[asked.rid] = asked.prompt.tolist()[len(asked.prompt) - asked.generated :]
        self.reported[asked.rid] = list(self.output[asked.rid])
        self.prompts_reported[asked.rid] = []
        self.events.append(Arrive(asked))

    def abort(self, rid: int) -> None:
        self.events.append(Abort(rid))
        if rid in self.requests and rid not in self.finished:
            self.aborted.add(rid)

    def launch(self) -> StepPlan | None:
        events, self.events = self.events, []
        self.now += self.tick
        plan = self.scheduler.schedule(events, self.now)
        self._take_ended()
        for rid in self.aborted:
            assert rid in self.finished, f"the abort of {rid} is not answered"
        if plan is not None:
            self.flying.append(plan)
            self.guard.check_launch(plan)
            self.plans.append(plan)
        self.check()
        return plan

    def collect(self) -> StepOutput | None:
        if not self.flying:
            return None
        plan = self.flying.popleft()
        tokens = self.device.execute(plan)
        self.guard.complete_step()
        self.now += self.tick
        output = self.scheduler.complete(tokens, self.now)
        self._take_reports(output)
        for rid, offset, token in zip(
            output.rids.tolist(), output.offsets.tolist(), output.tokens.tolist(), strict=True
        ):
            assert rid not in self.finished, f"request {rid} got a token after its end"
            assert offset == len(self.output[rid]), f"request {rid} has a gap or a repetition"
            self.output[rid].append(token)
            self._check_reports(rid)
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
        faults = find_integrity_faults(self.scheduler)
        assert not faults, faults
        assert self.scheduler.load().running <= self.config.max_running_requests
        events = self.scheduler.drain_cache_events()
        assert not self.blocks & set(events.stored)
        assert self.blocks >= set(events.evicted)
        self.blocks = (self.blocks | set(events.stored)) - set(events.evicted)
        assert self.blocks == set(self.scheduler.cache_snapshot())

    def _finish(self, end: Finished) -> None:
        assert end.rid not in self.finished, f"request {end.rid} ended twice"
        assert end.output_tokens == len(self.output[end.rid]), f"request {end.rid}: tokens are missing"
        self.finished[end.rid] = end

    def _take_reports(self, output: StepOutput) -> None:
        for part in output.side_outputs.logprobs:
            assert part.rid not in self.finished
            params = self.requests[part.rid].sampling
            top = params.prompt_logprobs if part.prompt else params.logprobs
            assert top is not None
            assert part.ids.shape == part.values.shape
            assert part.ids.shape[1] == 1 + top + (0 if part.prompt else len(params.logprob_token_ids))
            into = self.prompts_reported if part.prompt else self.reported
            into[part.rid] += part.ids[:, 0].tolist()
        for vector in output.side_outputs.vectors:
            assert vector.rid not in self.vectors, "an embedding came twice"
            assert [end.rid for end in output.finished].count(vector.rid) == 1
            self.vectors[vector.rid] = vector.vector

    def _check_reports(self, rid: int) -> None:
        """Check what was reported of a request that has just got a token."""
        asked = self.requests[rid]
        assert asked.pooling is None, "a request for an embedding got a token"
        prompt = asked.prompt.tolist()[: len(asked.prompt) - asked.generated]
        if asked.sampling.logprobs is not None:
            assert self.reported[rid] == self.output[rid]
        if asked.sampling.prompt_logprobs is not None:
            assert self.prompts_reported[rid] == prompt[1:], "the prompt's report is late or not whole"

    def _take_ended(self) -> None:
        for end in self.scheduler.drain_finished():
            self._finish(end)

    def _check_output(self, asked: Request, end: Finished) -> None:
        tokens, reason = run_alone(asked, self.config.capacity_tokens)
        got = self.output[asked.rid]
        assert end.prompt_tokens == len(asked.prompt) - asked.generated
        if asked.sampling.prompt_logprobs is not None and end.prompt_tokens > 1:
            assert end.cached_tokens == 0
        if asked.pooling is not None:
            self._check_embedding(asked, end)
            return
        assert 0 <= end.cached_tokens <= self._cacheable(asked)
        if end.reason is FinishReason.ERROR:
            assert end.message
            assert len(got) == asked.generated
        elif end.reason is FinishReason.ABORT:
            assert asked.rid in self.aborted
            assert got == tokens[: len(got)]
        else:
            assert (got, end.reason) == (tokens, reason), f"request {asked.rid} differs from itself run alone"
            assert end.stop_token == (tokens[-1] if reason is FinishReason.STOP else None)

    def _check_embedding(self, asked: Request, end: Finished) -> None:
        assert end.output_tokens == 0
        assert not self.output[asked.rid]
        if end.reason in (FinishReason.ERROR, FinishReason.ABORT):
            assert asked.rid not in self.vectors
            return
        assert end.reason is FinishReason.LENGTH
        assert asked.pooling is Pooling.LAST or end.cached_tokens == 0
        np.testing.assert_allclose(self.vectors[asked.rid], embedding(asked), atol=1e-5)

    def _cacheable(self, asked: Request) -> int:
        """Return how many prompt tokens other requests under the same salt may have left in the cache."""
        prompt, most = asked.prompt.tolist(), 0
        for other in self.requests.values():
            if other.rid == asked.rid or other.salt != asked.salt:
                continue
            own = len(other.prompt) - other.generated  # the output begins with what was generated elsewhere
            tokens = other.prompt.tolist()[:own] + self.output[other.rid]
            shared = next((i for i, (a, b) in enumerate(zip(prompt, tokens, strict=False)) if a != b), None)
            most = max(most, min(len(prompt), len(tokens)) if shared is None else shared)
        return min(most, max(len(prompt) - 1, 0), len(prompt) - asked.generated)

    def _check_empty(self) -> None:
        memory = self.scheduler.kv
        assert memory.available_pages == memory.pool.total, "pages stay held when nothing runs"
        for pages in memory.cache.evict(memory.pool.total):
            memory.pool.free(pages)
        assert sorted(memory.pool.free_pages().tolist()) == list(range(memory.pool.total))
        assert not self.scheduler.cache_snapshot()
