"""A loaded engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from msgspec.structs import replace

from mizzen.core.events import Abort, Arrive, Event
from mizzen.core.outputs import CacheEvents, GrammarCounts, Load, StepOutput
from mizzen.core.request import Finished, Request
from mizzen.core.scheduler import Scheduler
from mizzen.core.step_plan import Runner
from mizzen.engine.grammar.pending import GrammarIntake, Grammars
from mizzen.engine.info import EngineInfo
from mizzen.engine.overlap_loop import OverlapLoop


class Profiled(Protocol):
    """A runner that can be traced."""

    def request(self) -> None:
        """Let a trace begin with the next step."""
        ...


class Engine:
    """A scheduler and a device with a model; see `mizzen.engine.loading.loader.load_engine`.

    `submit` and `abort` may be called from any thread; the rest from one. A request with a grammar waits for
    its compilation outside of the scheduler, so that it holds up nobody.
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: Runner,
        grammars: Grammars | None = None,
        profiled: Profiled | None = None,
    ) -> None:
        """Take what was loaded; without `grammars` they are passed over, as a simulated device does."""
        self.info = info
        self._profiled = profiled
        self._loop = OverlapLoop(scheduler, runner)
        self._grammars = GrammarIntake(grammars) if grammars is not None else None
        self._events: deque[Event] = deque()

    @property
    def busy(self) -> bool:
        """Tell whether `step` has anything to do."""
        return bool(self._events) or self._loop.busy or (self._grammars is not None and self._grammars.waits)

    def submit(self, request: Request) -> None:
        """Let a request join the queue at the next step; a refusal comes back through `take_ended`."""
        self._events.append(Arrive(request))

    def abort(self, rid: int) -> None:
        """End a request at the next step; its `Finished` follows in a step or in `take_ended`."""
        self._events.append(Abort(rid))

    def step(self, now: float) -> StepOutput | None:
        """Launch what can be launched and wait for the oldest step; None when nothing is in flight.

        Raises:
            StepFailed: the device failed; the engine cannot go on.
        """
        while self._events:
            self._take(self._events.popleft())
        grammars = self._grammars
        if grammars is None or not grammars.active:
            return self._loop.step(now)
        for request in grammars.ready():
            self._loop.submit(request)
        for rid in grammars.failed():
            self._loop.abort(rid)
        output = self._loop.step(now)
        if output is None:
            if grammars.waits and not self._loop.busy:
                grammars.pause()
            return None
        if output.finished:
            return replace(output, finished=grammars.settle(output.finished))
        return output

    def take_ended(self) -> tuple[Finished, ...]:
        """Return the requests that ended outside a step since the last call."""
        ended, grammars = self._loop.take_ended(), self._grammars
        if grammars is None or not grammars.active:
            return ended
        return (*grammars.settle(ended), *grammars.take_ended())

    def take_cache_events(self) -> CacheEvents:
        """Return the blocks that entered or left the prefix cache since the last call."""
        return self._loop.take_cache_events()

    def cache_snapshot(self) -> tuple[int, ...]:
        """Return the names of all blocks in the prefix cache."""
        return self._loop.cache_snapshot()

    def load(self) -> Load:
        """Return how busy the engine is; requests whose grammar is compiled count as waiting."""
        load, grammars = self._loop.load(), self._grammars
        if grammars is None or not grammars.waits:
            return load
        count, tokens = grammars.load()
        return replace(load, waiting=load.waiting + count, waiting_tokens=load.waiting_tokens + tokens)

    @property
    def integrity_faults(self) -> int:
        """Faults of pages, slots and prefix tree found so far, by the checks of `check_integrity`."""
        return self._loop.integrity_faults

    def take_integrity_faults(self) -> tuple[str, ...]:
        """Return what these checks found since the last call, the first of it."""
        return self._loop.take_integrity_faults()

    @property
    def grammar_counts(self) -> GrammarCounts:
        """What structured output cost so far."""
        return self._grammars.counts if self._grammars is not None else GrammarCounts()

    def profile(self) -> None:
        """Let a trace of the next steps be taken; safe in a signal handler.

        Raises:
            ValueError: the engine was loaded without a folder for traces.
        """
        if self._profiled is None:
            raise ValueError("traces need a folder: start the engine with --profile FOLDER")
        self._profiled.request()

    def close(self) -> None:
        """Wait for what is in flight and free the device."""
        self._loop.close()
        if self._grammars is not None:
            self._grammars.close()

    def _take(self, event: Event) -> None:
        if isinstance(event, Abort):
            if self._grammars is None or not self._grammars.drop(event.rid):
                self._loop.abort(event.rid)
            return
        request: Request | None = event.request
        if self._grammars is not None and event.request.sampling.grammar is not None:
            request = self._grammars.take(event.request)
        if request is not None:
            self._loop.submit(request)
