# SPDX-License-Identifier: Apache-2.0
"""The scheduler: continuous batching with chunked prefill.

The engine's loop calls `schedule` for the next `StepPlan`, and `complete` with the tokens of a step. The
scheduler is deterministic: the same events and tokens give the same plans. Each step decodes all running
requests whose prefill is finished, and computes prefill chunks in the same batch (Sarathi-Serve, arXiv
2403.02310). Up to `steps_in_flight` steps are launched before the tokens of the first one are read. So a stop
token is noticed late, and tokens sampled after it are discarded; a length limit is known in advance.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mizzen.core.admission import PREFETCHING_REQUESTS, PrefillAdmission
from mizzen.core.config import SchedulerConfig
from mizzen.core.decode_batch import DecodeBatch
from mizzen.core.events import AbortRequest, AddRequest, Event
from mizzen.core.images.planner import ImagePlanner
from mizzen.core.images.types import MissingImages
from mizzen.core.inflight import DeferredFree, InflightStep, InflightSteps
from mizzen.core.kv.integrity import IntegrityMonitor
from mizzen.core.kv.manager import KvManager
from mizzen.core.kv.radix_cache import DuplicatePages
from mizzen.core.outputs import CacheEvents, Load, StepOutput
from mizzen.core.plan_builder import PlanBuilder
from mizzen.core.policies import RANKED
from mizzen.core.preemption import Preemption
from mizzen.core.prefill import fill_prefill, fill_prefill_by_rank
from mizzen.core.prefill_budget import PrefillBudget
from mizzen.core.request import Finished, FinishReason, Int32, Request
from mizzen.core.sequence import SequencePhase, SequenceState
from mizzen.core.side_outputs import NO_SIDE_OUTPUTS, route_side_outputs
from mizzen.core.step_plan import StepPlan, StepTokens
from mizzen.core.stop_tokens import StopTable
from mizzen.core.validation import RequestValidator


class Scheduler:
    """Turns events into step plans, and sampled tokens into outputs.

    The caller launches each plan that `schedule` returns, and passes the tokens of the steps to `complete` in
    the order of their launch. Not thread-safe.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv = KvManager(config)
        self.decode_batch = DecodeBatch(
            self.kv.slot_owners, config.columns, config.capacity_tokens, config.page_size
        )
        self.inflight = InflightSteps()
        self.integrity = IntegrityMonitor()
        self.images = ImagePlanner(config.image_capacity, config.encoding_cost)
        self.admission = PrefillAdmission(config, self.kv, self.images)
        self.step_budget = PrefillBudget(config)
        self.prefilling: list[SequenceState] = []
        """Running requests whose prefill is not finished, in order of admission."""
        self._stops = StopTable()
        self._validator = RequestValidator(config, self._stops, self.images)
        self._sequences: dict[int, SequenceState] = {}
        self._finished: list[Finished] = []
        self._page_rewrites: list[tuple[SequenceState, int, Int32]] = []
        """Page-table entries that the next plan changes to pages of the prefix cache: request, first column,
        pages (int32 [n])."""
        self._ranked = config.policy in RANKED
        self._fill_prefill = fill_prefill_by_rank if self._ranked else fill_prefill
        self._preemption = Preemption(config, self.kv, self.decode_batch, self.inflight, self.admission)

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._sequences) or len(self.inflight) > 0

    def schedule(self, events: Iterable[Event], now: float) -> StepPlan | None:
        """Apply events and return the plan of the next step, or None if no step can be launched now.

        The reason for None may be that there are no requests, that `steps_in_flight` steps are in flight, or
        that KV pages are short until a step in flight frees some.

        Args:
            events: requests that were added or aborted since the last call.
            now: time in seconds, of a monotonic clock.

        Raises:
            ValueError: the `rid` of a new request is already in use.
        """
        for event in events:
            if isinstance(event, AddRequest):
                self._add_request(event.request)
            elif isinstance(event, AbortRequest):
                self._abort(event)
            else:
                self.images.provide(event.digest, event.pixels)
        if len(self.inflight) >= self.config.steps_in_flight:
            return None
        if self._ranked and self.admission.queue:
            self._preempt(now)
        has_prefill = bool(self.prefilling or self.admission.queue)
        builder = PlanBuilder(0, self.kv, self.images)
        if self.decode_batch.size and not self._allocate_decode_pages(builder, now):
            return None
        if self._page_rewrites:
            self._write_deduped_pages(builder)
        if has_prefill:
            # Computed after `_allocate_decode_pages`, which may have retracted every decode.
            builder.budget = self.prefill_budget()
            self.prefilling += self._fill_prefill(
                builder, self.prefilling, self.admission, self.decode_batch.size
            )
        if not builder.chunks and not self.decode_batch.size:
            self._idle()
            return None
        return self._launch(builder, now)

    def complete(self, result: StepTokens, now: float) -> StepOutput:
        """Apply the tokens of the oldest step in flight, and return its output; `now` is the time in seconds.

        Raises:
            ValueError: `result` is not from the oldest step in flight, or its number of tokens is wrong.
        """
        inflight_step = self.inflight.complete(result.step)
        self.step_budget.record_step(
            inflight_step.launch_time, now, inflight_step.prompt_tokens, len(inflight_step.frame.rows) > 0
        )
        tokens, rows = inflight_step.tokens(result), inflight_step.rows
        step, frame = inflight_step.step, inflight_step.frame
        for timeline, preemptions in inflight_step.traced:
            timeline.receive_token(now, step, preemptions)
        if rows is not frame.rows:
            columns = self.decode_batch.columns(rows)
        else:
            columns = frame.columns = frame.columns or self.decode_batch.columns(rows)
        slot_owners = self.kv.slot_owners
        # Route side outputs before requests finish, because finishing frees their slots.
        side_outputs = NO_SIDE_OUTPUTS
        if result.side_outputs is not None:
            side_outputs = route_side_outputs(result.side_outputs, slot_owners)
        # Discarded tokens are stored too; their slots stay reserved until this step is complete.
        self.kv.flat_tokens[columns.tokens + step] = tokens
        finished: list[Finished] = []
        for row in self._stops.candidates(tokens, rows, self.decode_batch.stops):
            slot, token = rows.item(row), tokens.item(row)
            sequence = slot_owners[slot]
            # A request that finished (or was retracted) since the launch has left its slot.
            if sequence is not None and sequence.slot == slot and token in sequence.stop_tokens:
                finished.append(self._finish(sequence, FinishReason.STOP, token))
        if inflight_step.finishing:
            leaving = [last for last in inflight_step.finishing if last.phase is SequencePhase.LEAVING]
            finished += [self._finish(sequence, FinishReason.LENGTH) for sequence in leaving]
        for release in inflight_step.deferred_frees:
            self.kv.free(release)
        rids, offsets = columns.rids, columns.offsets
        if inflight_step.discarded:
            kept = inflight_step.kept_rows()
            rids, offsets, tokens = rids.take(kept), offsets.take(kept), tokens.take(kept)
        return StepOutput(
            step=step,
            rids=rids,
            offsets=(offsets + step).astype(np.int32),
            tokens=tokens,
            counts=None,
            finished=tuple(finished),
            side_outputs=side_outputs,
        )

    def drain_finished(self) -> tuple[Finished, ...]:
        """Return and clear the requests that were aborted or rejected since the last call."""
        ended, self._finished = tuple(self._finished), []
        return ended

    def drain_cache_events(self) -> CacheEvents:
        """Return the blocks that entered or left the prefix cache since the last call."""
        return self.kv.cache.drain_events()

    def drain_missing_images(self) -> tuple[MissingImages, ...]:
        """Return the images whose pixels requests need, found since the last call; see `ProvideImage`."""
        return self.images.drain_missing()

    def cache_snapshot(self) -> tuple[int, ...]:
        """Return the hashes of all blocks in the prefix cache."""
        return self.kv.cache.snapshot()

    def load(self) -> Load:
        """Return the current numbers of requests, waiting tokens and KV pages."""
        waiting = self.admission.queue
        return self.kv.measure_load(len(self._sequences) - len(waiting), len(waiting), waiting.tokens)

    def prefill_budget(self) -> int:
        """Return the maximum number of prompt tokens of the next step."""
        return self.step_budget.tokens(self.decode_batch.size > 0)

    def live_sequences(self) -> Iterable[SequenceState]:
        """Return all requests that wait or run."""
        return self._sequences.values()

    def _add_request(self, request: Request) -> None:
        if request.rid in self._sequences:
            raise ValueError(f"rid {request.rid} is already in use by a live request")
        queue = self.admission.queue
        rejected = self._validator.reject(request, queue.full)
        if rejected is not None:
            self._finished.append(rejected)
            return
        self._sequences[request.rid] = sequence = self._validator.accept(request)
        sequence.admissions_before = self.admission.admissions + queue.count_ahead(sequence)
        if request.images:
            self.images.add_request(sequence, self.kv.negative_tokens)
            if len(queue) < PREFETCHING_REQUESTS:
                self.admission.has_images(sequence)
        queue.add(sequence)

    def _abort(self, event: AbortRequest) -> None:
        sequence = self._sequences.get(event.rid)
        if sequence is not None:
            self._finished.append(self._finish(sequence, FinishReason.ABORT))

    def _finish(
        self, sequence: SequenceState, reason: FinishReason, stop_token: int | None = None
    ) -> Finished:
        """Finish a request in any phase; its slot and pages are freed after the last step that uses them."""
        if sequence.phase is SequencePhase.DECODE:
            # `_remove_from_batch` and `_free_slot` are inlined: this path runs two or three times a step.
            inflight = self.inflight
            self.decode_batch.remove(sequence, SequencePhase.LEAVING, inflight.launched)
            unread = inflight.discard_tokens(sequence.slot, sequence.first_sample, inflight.launched)
            known = sequence.computed + 1 - unread
            release = self.kv.prepare_free(sequence, sequence.computed, known)
            if not inflight.defer(release, inflight.launched):
                self.kv.free(release)
        elif sequence.slot >= 0:
            known = self._remove_from_batch(sequence)
            self._free_slot(sequence, known)
        else:
            self.admission.queue.remove(sequence)
            known = len(sequence.tokens)
        sequence.phase = SequencePhase.ENDED
        del self._sequences[sequence.rid]
        if sequence.request.images:
            self.images.remove_request(sequence)
        self._stops.remove(sequence.stop_tokens)
        return sequence.result(reason, known, stop_token)

    def _remove_from_batch(self, sequence: SequenceState) -> int:
        """Exclude a running request from future steps; return its number of known tokens."""
        if sequence.phase is SequencePhase.DECODE:
            self.decode_batch.remove(sequence, SequencePhase.LEAVING, self.inflight.launched)
        elif sequence.phase is SequencePhase.PREFILL:
            self.prefilling.remove(sequence)
        if not sequence.first_sample:
            return len(sequence.tokens)
        unread = self.inflight.discard_tokens(sequence.slot, sequence.first_sample, sequence.last_step)
        return sequence.computed + 1 - unread

    def _free_slot(self, sequence: SequenceState, known: int) -> None:
        self._free_or_defer(self.kv.prepare_free(sequence, sequence.computed, known), sequence.last_step)

    def _cache_prefix(self, sequence: SequenceState, tokens: int) -> list[DuplicatePages]:
        """Move the full pages of a running request's first `tokens` tokens into the prefix cache.

        If the cache already holds pages with the same tokens, the request uses them from now on, and its own
        copies are freed. Returns the cache's pages that replaced such copies.
        """
        duplicates = self.kv.cache_prefix(sequence, tokens)
        if duplicates:
            own = self.kv.dedupe(sequence, duplicates)
            self._free_or_defer(DeferredFree(pages=own), sequence.last_step)
        return duplicates

    def _free_or_defer(self, release: DeferredFree, last_step: int) -> None:
        if not self.inflight.defer(release, last_step):
            self.kv.free(release)

    def _retract(self, sequence: SequenceState, now: float, reason: str) -> None:
        """Move a running request back into the queue; later it resumes after its prompt and output so far.

        `reason` is the reason in the timeline of a traced request.
        """
        slot = sequence.slot
        if sequence.phase is SequencePhase.DECODE:  # a request admitted while it decoded did not overtake it
            sequence.admissions_before += self.admission.admissions - sequence.decodes_from
        known = self._remove_from_batch(sequence)
        if sequence.request.timeline is not None:
            sequence.request.timeline.preempt(now, reason, min(sequence.computed, known))
        # Cache immediately, so that the request matches its own pages if it resumes soon.
        self._cache_prefix(sequence, min(sequence.computed, known))
        self._free_slot(sequence, known)
        self.images.release(sequence)
        sequence.tokens = self.kv.tokens[slot, :known].copy()
        sequence.token_bytes, sequence.prefix_hint = b"", None
        sequence.computed = sequence.first_sample = sequence.last_step = 0
        sequence.phase = SequencePhase.WAITING
        self.admission.queue.requeue(sequence)

    def _preempt(self, now: float) -> None:
        """Retract running requests of lower priority if the head of the queue lacks a slot or pages."""
        for sequence in self._preemption.victims(self.prefilling, self.prefill_budget()):
            self._retract(sequence, now, "priority")

    def _allocate_decode_pages(self, builder: PlanBuilder, now: float) -> bool:
        """Allocate pages for the decoding requests that start a new page in the next step.

        If pages are short, the youngest requests are retracted. Returns False if the step must wait until a
        step in flight frees pages.
        """
        while True:
            growth = self.decode_batch.page_growth(self.inflight.launched + 1)
            if growth is None:
                return True
            slots, columns, flat_indices = growth
            pages = self.kv.allocate_pages(len(columns))
            if pages is not None:
                self.kv.flat_page_table[flat_indices] = pages
                builder.writes.append((slots, columns.astype(np.int32), pages))
                return True
            if self.inflight.frees_pending():
                return False
            if not self._make_room(len(columns), now):
                raise RuntimeError(
                    f"{len(columns)} pages are needed, {self.kv.available_pages} available: pages were leaked"
                )
            if not self.decode_batch.size:
                return True

    def _make_room(self, need: int, now: float) -> bool:
        """Retract the youngest requests until `need` pages are free, now or once steps in flight complete.

        Under the priority policy, requests of the lowest priority are retracted first. The last running
        request is never retracted, because any single request fits in the KV cache. Returns whether a
        request was retracted.
        """
        running = sorted(
            [*self.decode_batch, *self.prefilling],
            key=lambda sequence: (not sequence.starved, -sequence.rank, sequence.serial),
        )
        available, count = self.kv.available_pages, len(running)
        while available < need and len(running) > 1:
            youngest = running.pop()
            decoding = youngest.phase is SequencePhase.DECODE
            available += self.kv.reclaimable_pages(
                youngest, self.decode_batch.computed_tokens(youngest) if decoding else youngest.computed
            )
            self._retract(youngest, now, "memory")
        return len(running) < count

    def _write_deduped_pages(self, builder: PlanBuilder) -> None:
        for sequence, first, pages in self._page_rewrites:
            if sequence.slot >= 0:
                builder.write_pages(sequence.slot, first, pages)

    def _launch(self, builder: PlanBuilder, now: float) -> StepPlan:
        step, frame = self.inflight.launched + 1, self.decode_batch.frame()
        plan = builder.build(step, frame)
        self._page_rewrites.clear()  # the plan contains them
        inflight_step = InflightStep(
            step, frame, frame.rows, self.decode_batch.advance(step), now, builder.prompt_tokens
        )
        self.inflight.add(inflight_step)
        if builder.prefilled:
            self._launch_prefill(builder, inflight_step)
        self.integrity.unchecked = True
        return plan

    def _launch_prefill(self, builder: PlanBuilder, inflight_step: InflightStep) -> None:
        """Update the requests whose prefill chunks were just launched.

        Their full pages move into the prefix cache. A request whose last chunk was launched either decodes
        from the next step on, or finishes with this step (always if it only pools).
        """
        step = inflight_step.step
        sampled: list[int] = []
        for sequence, chunk in zip(builder.prefilled, builder.chunks, strict=True):
            sequence.last_step = step
            if sequence.request.timeline is not None:
                inflight_step.record_chunk(sequence.request.timeline, chunk)
            for first, pages in self._cache_prefix(sequence, sequence.computed):
                self._page_rewrites.append((sequence, first, pages))
            if sequence.computed < len(sequence.tokens):
                continue
            sequence.token_bytes = b""
            if not chunk.pools:
                sequence.first_sample = step
                sampled.append(sequence.slot)
                self.decode_batch.set_columns(sequence, step + 1)
            if chunk.pools or sequence.computed + 1 == sequence.limit:
                sequence.phase = SequencePhase.LEAVING
                inflight_step.finishing.append(sequence)
            else:
                sequence.decodes_from = self.admission.admissions
                self.decode_batch.add(sequence, step + 1)
        if sampled:
            inflight_step.rows = np.concatenate((inflight_step.rows, sampled))
        if sampled or inflight_step.finishing:
            self.prefilling = [one for one in self.prefilling if one.phase is SequencePhase.PREFILL]

    def _idle(self) -> None:
        if self.config.check_integrity and self.integrity.unchecked and not len(self.inflight):
            self.integrity.check(self)
