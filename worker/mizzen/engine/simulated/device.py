"""Device state without a device: executes plans on token ids, and holds them to their rules."""

from __future__ import annotations

from collections import deque

import numpy as np

from mizzen.core.request import Int32
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.step_plan import PrefillChunk, StepPlan, StepTokens
from mizzen.engine.simulated.scripts import Context, Script
from mizzen.engine.simulated.side_outputs import SideTable


class PlanViolation(RuntimeError):
    """A plan breaks a rule of `mizzen.core.step_plan`."""


class SimulatedDevice:
    """The state that plans change, and the rules that they must keep."""

    def __init__(
        self,
        *,
        slots: int,
        pages: int,
        page_size: int,
        context_length: int,
        script: Script,
        vocab_size: int = 1 << 17,
    ) -> None:
        """Arguments as in `SchedulerConfig`: `slots` is its max_running_requests, `pages` its pages_total."""
        self._side = SideTable(vocab_size)
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
            self._lengths[start.slot] = start.length
            self._prompts[start.slot] = -start.output_tokens
            self._started[start.slot] = (start.sampling, start.seed)
            self._side.start(start.slot, start.sampling, start.options)
            self._decoding.discard(start.slot)
        # A step reads what steps before it have written, so all reading comes before any writing.
        runs = [self._decode_run(plan, slot) for slot in plan.decode.tolist()]
        runs += [self._chunk_run(plan, chunk) for chunk in plan.prefill]
        for slot, before, tokens, _ in runs:
            self._write(slot, len(before), tokens)
        drawn = {
            slot: self._sample(slot, np.append(before, tokens)) for slot, before, tokens, last in runs if last
        }
        sampled = np.array(list(drawn.values()), np.int32).reshape(-1, 1)
        if not self._side.asks:
            return StepTokens(plan.step, sampled)
        chunks = [
            (chunk, np.append(before, tokens))
            for chunk, (_, before, tokens, _) in zip(plan.prefill, runs[len(plan.decode) :], strict=True)
        ]
        return StepTokens(plan.step, sampled, None, self._side.side(chunks, drawn))

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
            self._prompts[slot] += len(tokens)
        prompt_tokens = int(self._prompts[slot])
        token = self._script(Context(tokens, prompt_tokens, sampling, seed))
        token = self._side.allowed(slot, token, len(tokens) - prompt_tokens)
        self._last[slot] = token
        return token


Tenant = tuple[int, int]
"""A slot, and which of its requests."""

_SHARED: Tenant = (-1, -1)


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
        self._used: deque[tuple[set[int], dict[int, Tenant]]] = deque()
        """For each step in flight, its slots, and who uses each page (`_SHARED`: several)."""

    def launch(self, plan: StepPlan) -> None:
        """Take note of a step.

        Raises:
            PlanViolation: it uses what a step in flight uses for another request.
        """
        self._table[plan.pages.slots, plan.pages.columns] = plan.pages.pages
        for start in plan.starts:
            if any(start.slot in slots for slots, _ in self._used):
                raise PlanViolation(f"step {plan.step} starts slot {start.slot}, which a step in flight uses")
            self._lengths[start.slot] = start.length
            self._tenancy[start.slot] += 1
        runs = [(slot, 1) for slot in plan.decode.tolist()]
        runs += [(chunk.slot, len(chunk.tokens)) for chunk in plan.prefill]
        users: dict[int, Tenant] = {}
        for slot, count in runs:
            start, tenant = int(self._lengths[slot]), (slot, int(self._tenancy[slot]))
            self._lengths[slot] = end = start + count
            pages = self._table[slot, : -(-end // self._page_size)].tolist()
            self._check(plan.step, tenant, pages[start // self._page_size :])
            for page in pages:
                users[page] = tenant if users.get(page, tenant) == tenant else _SHARED
        self._used.append(({slot for slot, _ in runs}, users))

    def land(self) -> None:
        """Take note that the oldest step is complete."""
        self._used.popleft()

    def _check(self, step: int, tenant: Tenant, written: list[int]) -> None:
        for _, users in self._used:
            for page in written:
                if users.get(page, tenant) != tenant:
                    raise PlanViolation(
                        f"step {step} writes page {page} for slot {tenant[0]}, which a step in flight uses "
                        "for another request"
                    )
