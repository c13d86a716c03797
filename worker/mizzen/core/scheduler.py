"""Continuous batching: which requests run in a step, with which pages, and what its tokens mean.

Deterministic: the same events and tokens give the same plans. Every running request decodes in every step;
prompts are run in chunks beside them (Sarathi-Serve, arXiv 2403.02310). Up to `steps_in_flight` steps are
launched before the first one's tokens are read, so an end by a stop token is seen late: the surplus tokens
are passed over. An end by length is known ahead and costs no step.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mizzen.core.admission import Admission
from mizzen.core.config import SchedulerConfig
from mizzen.core.decode_batch import DecodeBatch
from mizzen.core.events import Abort, Arrive, Event
from mizzen.core.inflight import Flight, Flights, Release
from mizzen.core.kv.integrity import find_faults
from mizzen.core.kv.manager import KvMemory
from mizzen.core.kv.radix_cache import Duplicate
from mizzen.core.outputs import CacheEvents, Load, StepOutput
from mizzen.core.plan_builder import Draft
from mizzen.core.policies import RANKED
from mizzen.core.preemption import victims
from mizzen.core.prefill import fill, fill_by_rank, tokens_ahead
from mizzen.core.prefill_budget import Pace
from mizzen.core.report import NO_REPORTS, reports
from mizzen.core.request import Finished, FinishReason, Int32, Request
from mizzen.core.sequence import Phase, Sequence
from mizzen.core.step_plan import StepPlan, StepTokens
from mizzen.core.stop_tokens import StopTable
from mizzen.core.validation import Intake

MAX_FAULTS_TOLD = 16
"""One defect may show in every page."""


class Scheduler:
    """Turns events into plans, and the tokens of plans into outputs.

    Call `next` for a plan, launch it, and hand its tokens to `complete`, in the order of launch. Not
    thread-safe.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.memory = KvMemory(config)
        self.decode = DecodeBatch(
            self.memory.holders, config.columns, config.capacity_tokens, config.page_size
        )
        self.flights = Flights()
        self.integrity_checks = 0
        """Checks made while idle."""
        self.integrity_faults = 0
        """Faults that they found."""
        self._faults: tuple[str, ...] = ()
        self.admission = Admission(config, self.memory)
        self.pace = Pace(config)
        self.prefilling: list[Sequence] = []
        """In the order of admission."""
        self._stops = StopTable()
        self._intake = Intake(config, self._stops)
        self._live: dict[int, Sequence] = {}
        self._ended: list[Finished] = []
        self._rewrites: list[tuple[Sequence, int, Int32]] = []
        """Cells that the next plan points at the tree's pages: request, first column, pages."""
        self._unchecked = False
        self._ranked = config.policy in RANKED
        self._fill = fill_by_rank if self._ranked else fill
        self._none_lower = -1
        """The queue's changes when nobody ran who was of a lower priority than its first."""

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._live) or len(self.flights) > 0

    def next(self, events: Iterable[Event], now: float) -> StepPlan | None:
        """Take events in and return the next step, or None.

        None means that there is nothing to run, that `steps_in_flight` steps are in flight, or that KV is
        short and a step in flight will give some back.

        Raises:
            ValueError: a request's `rid` is that of a living one.
        """
        for event in events:
            if isinstance(event, Arrive):
                self._arrive(event.request)
            else:
                self._abort(event)
        if len(self.flights) >= self.config.steps_in_flight:
            return None
        if self._ranked and self.admission.queue:
            self._preempt()
        prompts = bool(self.prefilling or self.admission.queue)
        draft = Draft(0, self.memory)
        if self.decode.size and not self._grow(draft):
            return None
        if self._rewrites:
            self._write_adopted(draft)
        if prompts:
            # Behind `_grow`, which may have left nobody to decode.
            draft.budget = self.prefill_budget()
            self.prefilling += self._fill(draft, self.prefilling, self.admission, self.decode.size)
        if not draft.chunks and not self.decode.size:
            self._idle()
            return None
        return self._launch(draft, now)

    def complete(self, result: StepTokens, now: float) -> StepOutput:
        """Take the tokens of the oldest step in flight.

        Raises:
            ValueError: the step is another, or it has another number of tokens than it samples.
        """
        flight = self.flights.land(result.step)
        self.pace.landed(flight.launched, now, flight.prompt_tokens, len(flight.frame.rows) > 0)
        tokens, rows, step, frame = flight.tokens(result), flight.rows, flight.step, flight.frame
        if rows is not frame.rows:
            columns = self.decode.columns(rows)
        else:
            columns = frame.columns = frame.columns or self.decode.columns(rows)
        holders = self.memory.holders
        # Ahead of the ends, which free the slots.
        told = NO_REPORTS if result.side is None else reports(result.side, holders)
        # Tokens that nobody waits for are noted too: their slots are behind this step's fence.
        self.memory.flat_tokens[columns.tokens + step] = tokens
        finished: list[Finished] = []
        for row in self._stops.candidates(tokens, rows, self.decode.stops):
            slot, token = rows.item(row), tokens.item(row)
            sequence = holders[slot]
            # One that ended (or was retracted) since the launch has left its slot.
            if sequence is not None and sequence.slot == slot and token in sequence.stops:
                finished.append(self._end(sequence, FinishReason.STOP, token))
        if flight.leaving:
            leaving = [sequence for sequence in flight.leaving if sequence.phase is Phase.LEAVING]
            finished += [self._end(sequence, FinishReason.LENGTH) for sequence in leaving]
        for release in flight.releases:
            self.memory.release(release)
        rids, offsets = columns.rids, columns.offsets
        if flight.dropped:
            wanted = flight.wanted()
            rids, offsets, tokens = rids.take(wanted), offsets.take(wanted), tokens.take(wanted)
        return StepOutput(
            step=step,
            rids=rids,
            offsets=(offsets + step).astype(np.int32),
            tokens=tokens,
            counts=None,
            finished=tuple(finished),
            reports=told,
        )

    def take_ended(self) -> tuple[Finished, ...]:
        """Return the requests that ended outside a step since the last call: aborted or refused."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def take_cache_events(self) -> CacheEvents:
        """Return the blocks that entered or left the prefix cache since the last call."""
        return self.memory.cache.take_events()

    def cache_snapshot(self) -> tuple[int, ...]:
        """Return the names of all blocks in the prefix cache."""
        return self.memory.cache.snapshot()

    def load(self) -> Load:
        """Return how busy the scheduler is."""
        waiting, memory = self.admission.queue, self.memory
        return Load(
            running=len(self._live) - len(waiting),
            waiting=len(waiting),
            waiting_tokens=waiting.tokens,
            pages_total=memory.pool.total,
            pages_used=memory.pool.total - memory.available,
            pages_cached=memory.cache.evictable,
        )

    def prefill_budget(self) -> int:
        """Return how many prompt tokens the next step may run, beside the decodes or alone."""
        return self.pace.budget(self.decode.size > 0)

    def check_integrity(self) -> list[str]:
        """Return what is wrong with pages, slots and prefix tree: nothing, unless there is a defect."""
        return find_faults(self)

    def take_integrity_faults(self) -> tuple[str, ...]:
        """Return what the checks while idle found since the last call, the first of it."""
        faults, self._faults = self._faults, ()
        return faults

    def living(self) -> Iterable[Sequence]:
        """Return all requests that wait or run."""
        return self._live.values()

    def _arrive(self, request: Request) -> None:
        if request.rid in self._live:
            raise ValueError(f"rid {request.rid} is that of a living request")
        queue = self.admission.queue
        refused = self._intake.refuse(request, queue.full)
        if refused is not None:
            self._ended.append(refused)
            return
        self._live[request.rid] = sequence = self._intake.accept(request)
        sequence.admissions_before = self.admission.admissions + queue.ahead(sequence)
        queue.add(sequence)

    def _abort(self, event: Abort) -> None:
        sequence = self._live.get(event.rid)
        if sequence is not None:
            self._ended.append(self._end(sequence, FinishReason.ABORT))

    def _end(self, sequence: Sequence, reason: FinishReason, stop_token: int | None = None) -> Finished:
        """End a request in any phase; what it holds goes behind its fence."""
        if (
            sequence.phase is Phase.DECODE
        ):  # as `_leave_batch` and `_surrender`, in one piece: two or three a step
            flights = self.flights
            self.decode.remove(sequence, Phase.LEAVING, flights.launched)
            unread = flights.drop(sequence.slot, sequence.first_sample, flights.launched)
            known = sequence.computed + 1 - unread
            release = self.memory.surrender(sequence, sequence.computed, known)
            if not flights.fence(release, flights.launched):
                self.memory.release(release)
        elif sequence.slot >= 0:
            known = self._leave_batch(sequence)
            self._surrender(sequence, known)
        else:
            self.admission.queue.remove(sequence)
            known = len(sequence.tokens)
        sequence.phase = Phase.ENDED
        del self._live[sequence.rid]
        self._stops.release(sequence.stops)
        return Finished(
            rid=sequence.rid,
            reason=reason,
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            output_tokens=known - sequence.prompt_tokens if sequence.request.pooling is None else 0,
            stop_token=stop_token,
        )

    def _leave_batch(self, sequence: Sequence) -> int:
        """Take a request out of the steps to come; return how many of its tokens are known."""
        if sequence.phase is Phase.DECODE:
            self.decode.remove(sequence, Phase.LEAVING, self.flights.launched)
        elif sequence.phase is Phase.PREFILL:
            self.prefilling.remove(sequence)
        if not sequence.first_sample:
            return len(sequence.tokens)
        unread = self.flights.drop(sequence.slot, sequence.first_sample, sequence.last_step)
        return sequence.computed + 1 - unread

    def _surrender(self, sequence: Sequence, known: int) -> None:
        self._release(self.memory.surrender(sequence, sequence.computed, known), sequence.last_step)

    def _publish(self, sequence: Sequence, tokens: int) -> list[Duplicate]:
        """Cache the full pages of a running request; what the tree held already, it uses from now on."""
        duplicates = self.memory.publish(sequence, tokens)
        if duplicates:
            own = self.memory.adopt(sequence, duplicates)
            self._release(Release(pages=own), sequence.last_step)
        return duplicates

    def _release(self, release: Release, last_step: int) -> None:
        if not self.flights.fence(release, last_step):
            self.memory.release(release)

    def _retract(self, sequence: Sequence) -> None:
        """Put a running request back into the queue; it resumes from its prompt and output."""
        slot = sequence.slot
        if sequence.phase is Phase.DECODE:  # who was admitted meanwhile has not overtaken it
            sequence.admissions_before += self.admission.admissions - sequence.decodes_from
        known = self._leave_batch(sequence)
        # Cached at once, so that it finds its own pages when it comes back soon.
        self._publish(sequence, min(sequence.computed, known))
        self._surrender(sequence, known)
        sequence.tokens = self.memory.tokens[slot, :known].copy()
        sequence.data, sequence.known = b"", None
        sequence.computed = sequence.first_sample = sequence.last_step = 0
        sequence.phase = Phase.WAITING
        self.admission.queue.put_back(sequence)

    def _preempt(self) -> None:
        """Retract requests of low priority, for the first of a higher one that waits for slot or pages."""
        queue = self.admission.queue
        head = queue.head()
        if head is None or self._none_lower == queue.changes:
            return
        # What leaves is there again behind the steps in flight; it is no use to whom prompts keep from it.
        ahead = tokens_ahead(head, self.prefilling)
        if ahead and ahead >= self.prefill_budget() * self.config.steps_in_flight:
            return
        running = [*self.decode, *self.prefilling]
        if all(sequence.rank >= head.rank for sequence in running):
            # Whoever joins them from now on comes out of the queue.
            self._none_lower = queue.changes
            return
        known, reserve = self.admission.known(head), self.admission.reserve
        for sequence in victims(head, known, running, self.memory, self.decode, self.flights, reserve):
            self._retract(sequence)

    def _grow(self, draft: Draft) -> bool:
        """Give pages to the decodes that begin one; when they are short, retract the youngest requests.

        Returns False when the step has to wait for a fence.
        """
        while True:
            growth = self.decode.growth(self.flights.launched + 1)
            if growth is None:
                return True
            slots, columns, cells = growth
            pages = self.memory.take(len(columns))
            if pages is not None:
                self.memory.flat_table[cells] = pages
                draft.writes.append((slots, columns.astype(np.int32), pages))
                return True
            if self.flights.pending():
                return False
            if not self._make_room(len(columns)):
                raise RuntimeError(
                    f"{len(columns)} pages are needed, {self.memory.available} available: pages are lost"
                )
            if not self.decode.size:
                return True

    def _make_room(self, need: int) -> bool:
        """Retract the youngest requests until the others' next pages are covered, now or behind a fence.

        Those of a low priority go first, where the policy looks at it.
        Returns False when there was none to retract: one request alone always finds its pages.
        """
        running = sorted(
            [*self.decode, *self.prefilling], key=lambda one: (not one.urgent, -one.rank, one.serial)
        )
        room, count = self.memory.available, len(running)
        while room < need and len(running) > 1:
            youngest = running.pop()
            decodes = youngest.phase is Phase.DECODE
            room += self.memory.promised(
                youngest, self.decode.computed(youngest) if decodes else youngest.computed
            )
            self._retract(youngest)
        return len(running) < count

    def _write_adopted(self, draft: Draft) -> None:
        for sequence, first, pages in self._rewrites:
            if sequence.slot >= 0:
                draft.write_row(sequence.slot, first, pages)
        self._rewrites.clear()

    def _launch(self, draft: Draft, now: float) -> StepPlan:
        step, frame = self.flights.launched + 1, self.decode.frame()
        plan = draft.plan(step, frame)
        flight = Flight(step, frame, frame.rows, self.decode.advance(step), now, draft.prompt_tokens)
        self.flights.launch(flight)
        if draft.prefilled:
            self._launch_prefill(draft, flight)
        self._unchecked = True
        return plan

    def _launch_prefill(self, draft: Draft, flight: Flight) -> None:
        """Publish the chunks' pages; requests whose prompt is through decode from the next step on."""
        step = flight.step
        sampled: list[int] = []
        for sequence in draft.prefilled:
            sequence.last_step = step
            for first, pages in self._publish(sequence, sequence.computed):
                self._rewrites.append((sequence, first, pages))
            if sequence.computed < len(sequence.tokens):
                continue
            sequence.first_sample = step
            sequence.data = b""
            sampled.append(sequence.slot)
            self.decode.place(sequence, step + 1)
            if sequence.computed + 1 == sequence.limit:
                sequence.phase = Phase.LEAVING
                flight.leaving.append(sequence)
                if sequence.request.pooling is not None:
                    flight.dropped.append(sequence.slot)
            else:
                sequence.decodes_from = self.admission.admissions
                self.decode.add(sequence, step + 1)
        if sampled:
            flight.rows = np.concatenate((flight.rows, sampled))
            self.prefilling = [sequence for sequence in self.prefilling if sequence.phase is Phase.PREFILL]

    def _idle(self) -> None:
        if self.config.check_integrity and self._unchecked and not len(self.flights):
            self._unchecked = False
            self.integrity_checks += 1
            found = self.check_integrity()
            self.integrity_faults += len(found)
            self._faults = (*self._faults, *found)[:MAX_FAULTS_TOLD]
