# SPDX-License-Identifier: Apache-2.0
"""A scheduler with a simulated device, and checks of the scheduler's properties after every event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from mizzen.core.config import SchedulerConfig
from mizzen.core.events import AbortRequest, AddRequest, Event
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


def embedding(requested: Request) -> np.ndarray:
    """Return the expected vector of an embedding request, computed token by token."""
    states = [hidden_states(requested.prompt, i)[0] for i in range(len(requested.prompt))]
    chosen = {Pooling.LAST: states[-1:], Pooling.MEAN: states, Pooling.CLS: states[:1]}
    assert requested.pooling is not None
    pooled = np.mean(chosen[requested.pooling], axis=0)
    return pooled / np.linalg.norm(pooled)


def run_alone(requested: Request, capacity: int) -> tuple[list[int], FinishReason]:
    """Return the tokens and the finish reason of a request that runs without other requests."""
    params = requested.sampling
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {END_TOKEN})
    tokens = requested.prompt.tolist()
    first = len(tokens) - requested.generated
    limit = min(first + (params.max_tokens or capacity), capacity)
    while len(tokens) < limit:
        token = SCRIPT(ScriptContext(np.array(tokens, np.int32), first, params, requested.seed))
        while token in stops and len(tokens) - first < params.min_tokens:
            token = (token + 1) % VOCABULARY
        tokens.append(token)
        if token in stops:
            return tokens[first:], FinishReason.STOP
    return tokens[first:], FinishReason.LENGTH


class World:
    """A scheduler whose plans a simulated device executes; every plan and every output is checked."""

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
        self.inflight: deque[StepPlan] = deque()
        self.events: list[Event] = []
        self.requests: dict[int, Request] = {}
        self.output: dict[int, list[int]] = {}
        self.reported_tokens: dict[int, list[int]] = {}
        """Output tokens for which log probabilities were returned, by request."""
        self.reported_prompt_tokens: dict[int, list[int]] = {}
        """Prompt tokens for which log probabilities were returned, by request."""
        self.embeddings: dict[int, np.ndarray] = {}
        self.finished: dict[int, Finished] = {}
        self.plans: list[StepPlan] = []
        self.aborted: set[int] = set()
        self.blocks: set[int] = set()
        self.now = 0.0
        self.tick = 0.0
        """Seconds that pass before each launch and before each completion."""

    def arrive(self, requested: Request) -> None:
        self.requests[requested.rid] = requested
        self.output[requested.rid] = requested.prompt.tolist()[len(requested.prompt) - requested.generated :]
        self.reported_tokens[requested.rid] = list(self.output[requested.rid])
        self.reported_prompt_tokens[requested.rid] = []
        self.events.append(AddRequest(requested))

    def abort(self, rid: int) -> None:
        self.events.append(AbortRequest(rid))
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
            self.inflight.append(plan)
            self.guard.check_launch(plan)
            self.plans.append(plan)
        self.check()
        return plan

    def collect(self) -> StepOutput | None:
        if not self.inflight:
            return None
        plan = self.inflight.popleft()
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

    def run_until_idle(self) -> None:
        """Run until all requests have ended; fail if that takes more than a bounded number of steps."""
        tokens = sum(
            len(requested.prompt) + self.config.capacity_tokens for requested in self.requests.values()
        )
        for _ in range(20 * tokens + 50):
            launched = self.launch()
            if len(self.inflight) < self.config.steps_in_flight and launched is not None:
                continue
            if self.collect() is None and launched is None:
                break
        assert not self.scheduler.has_work, "a request never ends"

    def drain(self) -> None:
        """Run until all requests have ended; check the output of each, and that all pages are free again."""
        self.run_until_idle()
        assert set(self.finished) == set(self.requests)
        for rid, requested in self.requests.items():
            self._check_output(requested, self.finished[rid])
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
        for logprobs in output.side_outputs.logprobs:
            assert logprobs.rid not in self.finished
            params = self.requests[logprobs.rid].sampling
            top = params.prompt_logprobs if logprobs.prompt else params.logprobs
            assert top is not None
            assert logprobs.ids.shape == logprobs.values.shape
            assert logprobs.ids.shape[1] == 1 + top + (
                0 if logprobs.prompt else len(params.logprob_token_ids)
            )
            into = self.reported_prompt_tokens if logprobs.prompt else self.reported_tokens
            into[logprobs.rid] += logprobs.ids[:, 0].tolist()
        for vector in output.side_outputs.vectors:
            assert vector.rid not in self.embeddings, "an embedding came twice"
            assert [end.rid for end in output.finished].count(vector.rid) == 1
            self.embeddings[vector.rid] = vector.vector

    def _check_reports(self, rid: int) -> None:
        """Check the log probabilities returned so far for a request that has just got a token."""
        requested = self.requests[rid]
        assert requested.pooling is None, "an embedding request got a token"
        prompt = requested.prompt.tolist()[: len(requested.prompt) - requested.generated]
        if requested.sampling.logprobs is not None:
            assert self.reported_tokens[rid] == self.output[rid]
        if requested.sampling.prompt_logprobs is not None:
            first = max(1, requested.sampling.prompt_logprobs_from)
            reported = self.reported_prompt_tokens[rid]
            assert reported == prompt[first:], "prompt logprobs are late or incomplete"

    def _take_ended(self) -> None:
        for end in self.scheduler.drain_finished():
            self._finish(end)

    def _check_output(self, requested: Request, end: Finished) -> None:
        tokens, reason = run_alone(requested, self.config.capacity_tokens)
        output = self.output[requested.rid]
        assert end.prompt_tokens == len(requested.prompt) - requested.generated
        first = max(1, requested.sampling.prompt_logprobs_from)
        if requested.sampling.prompt_logprobs is not None and end.prompt_tokens > first:
            assert end.cached_tokens < first
        if requested.pooling is not None:
            self._check_embedding(requested, end)
            return
        assert 0 <= end.cached_tokens <= self._cacheable(requested)
        if end.reason is FinishReason.ERROR:
            assert end.message
            assert len(output) == requested.generated
        elif end.reason is FinishReason.ABORT:
            assert requested.rid in self.aborted
            assert output == tokens[: len(output)]
        else:
            assert (output, end.reason) == (tokens, reason), (
                f"request {requested.rid} differs from itself run alone"
            )
            assert end.stop_token == (tokens[-1] if reason is FinishReason.STOP else None)

    def _check_embedding(self, requested: Request, end: Finished) -> None:
        assert end.output_tokens == 0
        assert not self.output[requested.rid]
        if end.reason in (FinishReason.ERROR, FinishReason.ABORT):
            assert requested.rid not in self.embeddings
            return
        assert end.reason is FinishReason.LENGTH
        assert requested.pooling is Pooling.LAST or end.cached_tokens == 0
        np.testing.assert_allclose(self.embeddings[requested.rid], embedding(requested), atol=1e-5)

    def _cacheable(self, requested: Request) -> int:
        """Return the largest number of its prompt tokens that a request can find in the prefix cache.

        Only other requests with the same salt can have stored these tokens.
        """
        prompt, most = requested.prompt.tolist(), 0
        for neighbour in self.requests.values():
            if neighbour.rid == requested.rid or neighbour.salt != requested.salt:
                continue
            own = len(neighbour.prompt) - neighbour.generated  # `output` contains the resumed tokens, too
            tokens = neighbour.prompt.tolist()[:own] + self.output[neighbour.rid]
            shared = next((i for i, (a, b) in enumerate(zip(prompt, tokens, strict=False)) if a != b), None)
            most = max(most, min(len(prompt), len(tokens)) if shared is None else shared)
        return min(most, max(len(prompt) - 1, 0), len(prompt) - requested.generated)

    def _check_empty(self) -> None:
        memory = self.scheduler.kv
        assert memory.available_pages == memory.pool.total, "pages stay held when nothing runs"
        for pages in memory.cache.evict(memory.pool.total):
            memory.pool.free(pages)
        assert sorted(memory.pool.free_pages().tolist()) == list(range(memory.pool.total))
        assert not self.scheduler.cache_snapshot()
