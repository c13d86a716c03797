"""A runner without a model: real device state, scripted tokens and scripted speed.

Each KV cell holds the id of the token that a model would have computed it from, and the next token is chosen
from the whole sequence as it is found through the page table. So a page that is lost, reused too early or
shared wrongly changes the output, or is caught at once. Steps run in a worker thread.
"""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mizzen.core.params import SamplingParams
from mizzen.core.plan import PrefillChunk, StepPlan, StepTokens
from mizzen.core.request import Int32


class PlanViolation(RuntimeError):
    """A plan breaks a rule of `mizzen.core.plan`."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a script sees: all tokens of a sequence, as its KV says."""

    tokens: Int32
    prompt_tokens: int
    """Known when the slot was started: the prompt, after a retraction also the output before it."""
    sampling: SamplingParams
    seed: int


Script = Callable[[Context], int]
"""Chooses the token that follows."""


def hashed(vocab_size: int, first: int = 0) -> Script:
    """Return a script whose token is a hash of the whole sequence, in [first, vocab_size).

    Depends on the seed unless the temperature is 0, and not on where a retraction cut the sequence.
    """

    def choose(context: Context) -> int:
        seed = context.seed & 0xFFFFFFFF if context.sampling.temperature > 0 else 0
        return first + zlib.crc32(context.tokens.tobytes(), seed) % (vocab_size - first)

    return choose


def echo(end_token: int) -> Script:
    """Return a script that repeats the prompt once and then ends."""

    def choose(context: Context) -> int:
        done = len(context.tokens) - context.prompt_tokens
        return int(context.tokens[done]) if done < context.prompt_tokens else end_token

    return choose


def fixed(tokens: Sequence[int], end_token: int) -> Script:
    """Return a script that answers every prompt with the same tokens and then ends."""

    def choose(context: Context) -> int:
        done = len(context.tokens) - context.prompt_tokens
        return int(tokens[done]) if done < len(tokens) else end_token

    return choose


def ends_after(script: Script, count: int, end_token: int) -> Script:
    """Return a script that ends another one's output after `count` tokens."""

    def choose(context: Context) -> int:
        done = len(context.tokens) - context.prompt_tokens
        return script(context) if done < count else end_token

    return choose


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How long a step takes, in seconds."""

    step: float = 0.0
    prefill_token: float = 0.0
    decode: float = 0.0
    """For each decoding request."""

    def seconds(self, plan: StepPlan) -> float:
        """Return a plan's time."""
        tokens = sum(len(chunk.tokens) for chunk in plan.prefill)
        return self.step + self.prefill_token * tokens + self.decode * len(plan.decode)


class SimulatedDevice:
    """The state that plans change, and the rules that they must keep."""

    def __init__(
        self, *, slots: int, pages: int, page_size: int, context_length: int, script: Script
    ) -> None:
        """Arguments as in `SchedulerConfig`: `slots` is its max_running_requests, `pages` its pages_total."""
        self._page_size = page_size
        self._script = script
        self._table: Int32 = np.full((slots, -(-context_length // page_size)), -1, np.int32)
        self._cells: Int32 = np.full((pages, page_size), -1, np.int32)
        self._lengths: Int32 = np.zeros(slots, np.int32)
        self._last: Int32 = np.full(slots, -1, np.int32)
        self._prompts: Int32 = np.zeros(slots, np.int32)
        self._started: dict[int, tuple[SamplingParams, int]] = {}
        self._decoding: set[int] = set()
        """Slots that have sampled since they were started."""
        self._step = 0
        self._decode: Int32 = np.empty(0, np.int32)
        self._version: int | None = None

    def execute(self, plan: StepPlan) -> StepTokens:
        """Run one step.

        Raises:
            PlanViolation: says which rule the plan breaks.
        """
        self._check_batch(plan)
        writes = plan.pages
        if len(writes.pages) and not 0 <= writes.pages.min() <= writes.pages.max() < len(self._cells):
            raise PlanViolation(f"step {plan.step}: a page is out of range")
        self._table[writes.slots, writes.columns] = writes.pages
        for start in plan.starts:
            self._lengths[start.slot] = self._prompts[start.slot] = start.length
            self._started[start.slot] = (start.sampling, start.seed)
            self._decoding.discard(start.slot)
        # A step reads what steps before it have written, so all reading comes before any writing.
        runs = [self._decode_run(plan, slot) for slot in plan.decode.tolist()]
        runs += [self._chunk_run(plan, chunk) for chunk in plan.prefill]
        for slot, before, tokens, _ in runs:
            self._write(slot, len(before), tokens)
        sampled = [
            self._sample(slot, np.append(before, tokens)) for slot, before, tokens, last in runs if last
        ]
        return StepTokens(plan.step, np.array(sampled, np.int32).reshape(-1, 1))

    def _check_batch(self, plan: StepPlan) -> None:
        if plan.step != self._step + 1:
            raise PlanViolation(f"step {plan.step} follows step {self._step}")
        same = self._version is not None and np.array_equal(plan.decode, self._decode)
        if self._version is not None and (plan.decode_version == self._version) != same:
            raise PlanViolation(
                f"step {plan.step}: decode is {'the same' if same else 'another'}, its version is not honest"
            )
        slots = [*plan.decode.tolist(), *(chunk.slot for chunk in plan.prefill)]
        if not slots:
            raise PlanViolation(f"step {plan.step} runs nothing")
        if len(set(slots)) < len(slots):
            raise PlanViolation(f"step {plan.step} runs a slot twice")
        self._step, self._version, self._decode = plan.step, plan.decode_version, plan.decode.copy()

    def _decode_run(self, plan: StepPlan, slot: int) -> tuple[int, Int32, Int32, bool]:
        if slot not in self._decoding:
            raise PlanViolation(f"step {plan.step}: slot {slot} decodes before its prompt is through")
        before = self._read(plan, slot, int(self._lengths[slot]))
        return slot, before, self._last[slot : slot + 1].copy(), True

    def _chunk_run(self, plan: StepPlan, chunk: PrefillChunk) -> tuple[int, Int32, Int32, bool]:
        slot, length = chunk.slot, int(self._lengths[chunk.slot])
        if slot not in self._started or slot in self._decoding:
            raise PlanViolation(f"step {plan.step}: a chunk of slot {slot}, which was not started for it")
        if chunk.start != length or not len(chunk.tokens):
            raise PlanViolation(
                f"step {plan.step}: a chunk of {len(chunk.tokens)} tokens from position {chunk.start} of "
                f"slot {slot}, whose length is {length}"
            )
        return slot, self._read(plan, slot, length), chunk.tokens, chunk.last

    def _read(self, plan: StepPlan, slot: int, length: int) -> Int32:
        """Return the tokens at positions 0..length-1 of a slot."""
        pages = self._table[slot, : -(-length // self._page_size)]
        tokens = self._cells[pages].reshape(-1)[:length]
        if len(tokens) and (pages.min() < 0 or tokens.min() < 0):
            raise PlanViolation(f"step {plan.step}: slot {slot} reads KV that no step has written")
        return tokens

    def _write(self, slot: int, start: int, tokens: Int32) -> None:
        positions = np.arange(start, start + len(tokens))
        columns, offsets = positions // self._page_size, positions % self._page_size
        if columns[-1] >= self._table.shape[1] or (pages := self._table[slot, columns]).min() < 0:
            raise PlanViolation(
                f"step {self._step}: the page table of slot {slot} does not cover position {positions[-1]}"
            )
        self._cells[pages, offsets] = tokens
        self._lengths[slot] = start + len(tokens)

    def _sample(self, slot: int, tokens: Int32) -> int:
        sampling, seed = self._started[slot]
        if slot not in self._decoding:
            self._decoding.add(slot)
            self._prompts[slot] = len(tokens)
        token = self._script(Context(tokens, int(self._prompts[slot]), sampling, seed))
        self._last[slot] = token
        return token


class FenceGuard:
    """Checks at launch that no step takes a slot or page that a step in flight still uses.

    A page may be read by many; it is written for one request only while no other's step in flight uses it.
    """

    def __init__(self, *, slots: int, page_size: int, context_length: int) -> None:
        """Take the device's sizes."""
        self._page_size = page_size
        self._table: Int32 = np.full((slots, -(-context_length // page_size)), -1, np.int32)
        self._lengths: Int32 = np.zeros(slots, np.int32)
        self._tenancy: Int32 = np.zeros(slots, np.int32)
        """Counts the requests that each slot has had."""
        self._used: deque[dict[int, tuple[int, set[int]]]] = deque()
        """For each step in flight, its slots: tenancy and pages."""

    def launch(self, plan: StepPlan) -> None:
        """Take note of a step.

        Raises:
            PlanViolation: it uses what a step in flight uses for another request.
        """
        self._table[plan.pages.slots, plan.pages.columns] = plan.pages.pages
        for start in plan.starts:
            if any(start.slot in used for used in self._used):
                raise PlanViolation(f"step {plan.step} starts slot {start.slot}, which a step in flight uses")
            self._lengths[start.slot] = start.length
            self._tenancy[start.slot] += 1
        runs = [(slot, 1) for slot in plan.decode.tolist()]
        runs += [(chunk.slot, len(chunk.tokens)) for chunk in plan.prefill]
        now: dict[int, tuple[int, set[int]]] = {}
        for slot, count in runs:
            start = int(self._lengths[slot])
            self._lengths[slot] = end = start + count
            pages = self._table[slot, : -(-end // self._page_size)].tolist()
            self._check(plan.step, slot, set(pages[start // self._page_size :]))
            now[slot] = int(self._tenancy[slot]), set(pages)
        self._used.append(now)

    def land(self) -> None:
        """Take note that the oldest step is complete."""
        self._used.popleft()

    def _check(self, step: int, slot: int, written: set[int]) -> None:
        for used in self._used:
            for other, (tenancy, pages) in used.items():
                if (other != slot or tenancy != self._tenancy[slot]) and not written.isdisjoint(pages):
                    raise PlanViolation(
                        f"step {step} writes pages {sorted(written & pages)} for slot {slot}, which a step "
                        f"in flight uses for slot {other}"
                    )


class SimulatedRunner:
    """A `Runner` that executes plans on a `SimulatedDevice` in a worker thread, at a given speed."""

    def __init__(
        self,
        device: SimulatedDevice,
        speed: Speed | None = None,
        delay: Callable[[StepPlan], float] | None = None,
        guard: FenceGuard | None = None,
    ) -> None:
        """Start the worker.

        Args:
            device: fresh device state.
            speed: how long a step takes; no time by default.
            delay: seconds to add to a step, decided when it runs; may raise, to let the step fail.
            guard: checks the fences at each launch.
        """
        self._device = device
        self._speed = speed or Speed()
        self._delay = delay
        self._guard = guard
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: deque[StepTokens | BaseException] = deque()
        self._landed = threading.Condition()
        self._in_flight = 0
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="simulated-device", daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step."""
        if self._closed:
            raise RuntimeError("the runner is closed")
        if self._guard is not None:
            self._guard.launch(plan)
        self._in_flight += 1
        self._plans.put(plan)

    def ready(self) -> bool:
        """Tell whether the oldest step has ended."""
        return bool(self._results)

    def collect(self) -> StepTokens:
        """Wait for the oldest step and return its tokens; raise what it raised."""
        if not self._in_flight:
            raise RuntimeError("no step is in flight")
        with self._landed:
            while not self._results:
                self._landed.wait(timeout=1.0)
            result = self._results.popleft()
        self._in_flight -= 1
        if self._guard is not None:
            self._guard.land()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """Let the steps in flight end, then the worker."""
        if not self._closed:
            self._closed = True
            self._plans.put(None)
            self._thread.join()

    def _work(self) -> None:
        failure: Exception | None = None
        while (plan := self._plans.get()) is not None:
            result: StepTokens | BaseException
            try:
                if failure is not None:
                    raise RuntimeError(f"an earlier step failed: {failure}")
                seconds = self._speed.seconds(plan) + (self._delay(plan) if self._delay else 0.0)
                if seconds > 0:
                    time.sleep(seconds)
                result = self._device.execute(plan)
            except Exception as error:
                result, failure = error, failure or error
            with self._landed:
                self._results.append(result)
                self._landed.notify()


def simulated_runner(
    *,
    slots: int,
    pages: int,
    page_size: int,
    context_length: int,
    script: Script,
    speed: Speed | None = None,
    delay: Callable[[StepPlan], float] | None = None,
) -> SimulatedRunner:
    """Return a runner with a device of the given sizes, and a guard of its fences."""
    device = SimulatedDevice(
        slots=slots, pages=pages, page_size=page_size, context_length=context_length, script=script
    )
    guard = FenceGuard(slots=slots, page_size=page_size, context_length=context_length)
    return SimulatedRunner(device, speed, delay, guard)
