# SPDX-License-Identifier: Apache-2.0
"""A simulated device: executes plans on token ids instead of KV, and checks that the plans are valid.

`SimulatedRunner` and the scheduler's tests use it. An invalid plan raises `PlanViolation`.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from mizzen.core.request import Int32, Int64
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.step_plan import PrefillChunk, StepPlan, StepTokens
from mizzen.engine.simulated.images import PlanViolation, SimulatedImages
from mizzen.engine.simulated.scripts import Script, ScriptContext
from mizzen.engine.simulated.side_outputs import SimulatedSideOutputs

UNWRITTEN = np.iinfo(np.int64).min
"""Content of KV that no step has written; no token has this id, even though ids of images are negative."""


class SimulatedDevice:
    """State of a simulated device, with checks of the plans that it executes."""

    def __init__(
        self,
        *,
        slots: int,
        pages: int,
        page_size: int,
        context_length: int,
        script: Script,
        vocab_size: int = 1 << 17,
        labels: int = 0,
        image_capacity: int = 0,
    ) -> None:
        """Allocate the state of a device.

        Args:
            slots: Number of slots; `max_running_requests` of the `SchedulerConfig`.
            pages: Number of KV pages; `pages_total` of the `SchedulerConfig`.
            page_size: Tokens per KV page.
            context_length: Maximum number of tokens of a request.
            script: Chooses the sampled tokens.
            vocab_size: Size of the vocabulary; only log probabilities and end bans need it.
            labels: Number of labels of a classifier; 0 for other models.
            image_capacity: Number of embeddings of images that the device keeps.
        """
        self._side_outputs = SimulatedSideOutputs(vocab_size, labels)
        self._page_size = page_size
        self._script = script
        self._table: Int32 = np.full((slots, -(-context_length // page_size)), -1, np.int32)
        self._kv_tokens: Int64 = np.full((pages, page_size), UNWRITTEN, np.int64)
        self._vocab_size = vocab_size
        self._images = SimulatedImages(image_capacity)
        self._lengths: Int32 = np.zeros(slots, np.int32)
        self._last: Int32 = np.full(slots, -1, np.int32)
        self._prompts: Int32 = np.zeros(slots, np.int32)
        self._started: dict[int, tuple[SamplingParams, int]] = {}
        self._decoding: set[int] = set()
        """Slots that have sampled a token since their request started."""
        self._step = 0
        self._decode: Int32 = np.empty(0, np.int32)
        self._version: int | None = None

    def execute(self, plan: StepPlan) -> StepTokens:
        """Run a step and return its tokens.

        Raises:
            PlanViolation: The plan is invalid.
        """
        self._check_batch(plan)
        writes = plan.pages
        if len(writes.pages) and not 0 <= writes.pages.min() <= writes.pages.max() < len(self._kv_tokens):
            raise PlanViolation(f"step {plan.step}: a page is out of range")
        self._table[writes.slots, writes.columns] = writes.pages
        for start in plan.starts:
            self._lengths[start.slot] = start.length
            self._prompts[start.slot] = -start.output_tokens
            self._started[start.slot] = (start.sampling, start.seed)
            self._side_outputs.start_slot(start.slot, start.sampling, start.options)
            self._decoding.discard(start.slot)
        self._images.update(plan)
        # A step must only read what previous steps have written, so read everything before the first write.
        runs = [self._decode_run(plan, slot) for slot in plan.decode.tolist()]
        runs += [self._chunk_run(plan, chunk) for chunk in plan.prefill]
        for slot, before, tokens, _ in runs:
            self._write(slot, len(before), tokens)
        tokens_by_slot = {
            slot: self._sample(slot, np.append(before, tokens)) for slot, before, tokens, last in runs if last
        }
        sampled = np.array(list(tokens_by_slot.values()), np.int32).reshape(-1, 1)
        if not self._side_outputs.options_by_slot:
            return StepTokens(plan.step, sampled)
        chunks = [
            (chunk, np.append(before, tokens))
            for chunk, (_, before, tokens, _) in zip(plan.prefill, runs[len(plan.decode) :], strict=True)
        ]
        return StepTokens(plan.step, sampled, None, self._side_outputs.step_outputs(chunks, tokens_by_slot))

    def _check_batch(self, plan: StepPlan) -> None:
        if plan.step != self._step + 1:
            raise PlanViolation(f"step {plan.step} follows step {self._step}")
        unchanged = self._version is not None and np.array_equal(plan.decode, self._decode)
        if self._version is not None and (plan.decode_version == self._version) != unchanged:
            raise PlanViolation(
                f"step {plan.step}: decode {'did not change' if unchanged else 'changed'}, "
                "but its version suggests the opposite"
            )
        slots = [*plan.decode.tolist(), *(chunk.slot for chunk in plan.prefill)]
        if not slots and not plan.encodings:
            raise PlanViolation(f"step {plan.step} runs nothing")
        if len(set(slots)) < len(slots):
            raise PlanViolation(f"step {plan.step} runs a slot twice")
        self._step, self._version, self._decode = plan.step, plan.decode_version, plan.decode.copy()

    def _decode_run(self, plan: StepPlan, slot: int) -> tuple[int, Int32, Int32, bool]:
        if slot not in self._decoding:
            raise PlanViolation(f"step {plan.step}: slot {slot} decodes before its prefill is finished")
        before = self._read(plan, slot, int(self._lengths[slot]))
        return slot, before, self._last[slot : slot + 1].copy(), True

    def _chunk_run(self, plan: StepPlan, chunk: PrefillChunk) -> tuple[int, Int32, Int32, bool]:
        slot, length = chunk.slot, int(self._lengths[chunk.slot])
        if slot not in self._started or slot in self._decoding:
            raise PlanViolation(f"step {plan.step}: a chunk of slot {slot} without a start of the slot")
        if chunk.start != length or not len(chunk.tokens):
            raise PlanViolation(
                f"step {plan.step}: a chunk of {len(chunk.tokens)} tokens from position {chunk.start} of "
                f"slot {slot}, whose length is {length}"
            )
        self._images.check_chunk(plan, chunk)
        return slot, self._read(plan, slot, length), chunk.tokens, chunk.samples

    def _read(self, plan: StepPlan, slot: int, length: int) -> Int32:
        """Read the tokens at positions 0..length-1 of a slot through the page table, int32 [length]."""
        pages = self._table[slot, : -(-length // self._page_size)]
        tokens = self._kv_tokens[pages].reshape(-1)[:length]
        if len(tokens) and (pages.min() < 0 or tokens.min() == UNWRITTEN):
            raise PlanViolation(f"step {plan.step}: slot {slot} reads KV that no step has written")
        return tokens.astype(np.int32)

    def _write(self, slot: int, start: int, tokens: Int32) -> None:
        positions = np.arange(start, start + len(tokens))
        columns, offsets = positions // self._page_size, positions % self._page_size
        if columns[-1] >= self._table.shape[1] or (pages := self._table[slot, columns]).min() < 0:
            raise PlanViolation(
                f"step {self._step}: the page table of slot {slot} does not cover position {positions[-1]}"
            )
        self._kv_tokens[pages, offsets] = tokens
        self._lengths[slot] = start + len(tokens)

    def _sample(self, slot: int, tokens: Int32) -> int:
        sampling, seed = self._started[slot]
        if slot not in self._decoding:
            self._decoding.add(slot)
            self._prompts[slot] += len(tokens)
        prompt_tokens = int(self._prompts[slot])
        token = self._script(ScriptContext(tokens, prompt_tokens, sampling, seed))
        token = token if token >= 0 else ~token % self._vocab_size  # the script repeats a token of an image
        token = self._side_outputs.avoid_early_end(slot, token, len(tokens) - prompt_tokens)
        self._last[slot] = token
        return token


SlotRequest = tuple[int, int]
"""A slot, and the number of its request among all requests that the slot has had."""

_SHARED: SlotRequest = (-1, -1)
"""Stands for the users of a page that several requests use."""


class InflightUseGuard:
    """Checks at launch that a step does not reuse a slot or page which a step in flight still uses.

    Several requests may read a page. A page may be written for a request only if no step in flight uses it
    for another request.
    """

    def __init__(self, *, slots: int, page_size: int, context_length: int) -> None:
        """Allocate state for `slots` slots, whose requests have at most `context_length` tokens.

        `page_size` is the number of tokens per KV page.
        """
        self._page_size = page_size
        self._table: Int32 = np.full((slots, -(-context_length // page_size)), -1, np.int32)
        self._lengths: Int32 = np.zeros(slots, np.int32)
        self._request_numbers: Int32 = np.zeros(slots, np.int32)
        """Number of requests that each slot has had."""
        self._inflight: deque[tuple[set[int], dict[int, SlotRequest]]] = deque()
        """Slots and pages of each step in flight; each page has its user (`_SHARED` if it has several)."""

    def check_launch(self, plan: StepPlan) -> None:
        """Check a step, and add it to the steps in flight.

        Raises:
            PlanViolation: The step starts a slot that a step in flight uses, or writes a page that a step in
                flight uses for another request.
        """
        self._table[plan.pages.slots, plan.pages.columns] = plan.pages.pages
        for start in plan.starts:
            if any(start.slot in slots for slots, _ in self._inflight):
                raise PlanViolation(f"step {plan.step} starts slot {start.slot}, which a step in flight uses")
            self._lengths[start.slot] = start.length
            self._request_numbers[start.slot] += 1
        runs = [(slot, 1) for slot in plan.decode.tolist()]
        runs += [(chunk.slot, len(chunk.tokens)) for chunk in plan.prefill]
        users: dict[int, SlotRequest] = {}
        for slot, count in runs:
            start, slot_request = int(self._lengths[slot]), (slot, int(self._request_numbers[slot]))
            self._lengths[slot] = end = start + count
            pages = self._table[slot, : -(-end // self._page_size)].tolist()
            self._check(plan.step, slot_request, pages[start // self._page_size :])
            for page in pages:
                users[page] = slot_request if users.get(page, slot_request) == slot_request else _SHARED
        self._inflight.append(({slot for slot, _ in runs}, users))

    def complete_step(self) -> None:
        """Remove the oldest step from the steps in flight."""
        self._inflight.popleft()

    def _check(self, step: int, slot_request: SlotRequest, written: list[int]) -> None:
        for _, users in self._inflight:
            for page in written:
                if users.get(page, slot_request) != slot_request:
                    raise PlanViolation(
                        f"step {step} writes page {page} for slot {slot_request[0]}, "
                        "which a step in flight uses for another request"
                    )
