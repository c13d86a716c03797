# SPDX-License-Identifier: Apache-2.0
"""The inference engine: accepts requests and returns their tokens, one step at a time.

The serving loop (`mizzen.server.serving_loop`) and `LLM` call it. Only `submit`, `abort` and `provide_image`
are thread-safe.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

from msgspec.structs import replace

from mizzen.core.events import AbortRequest, AddRequest, Event, ProvideImage
from mizzen.core.images.types import MissingImages
from mizzen.core.outputs import CacheEvents, ExpertUse, GrammarCounts, Load, StepOutput
from mizzen.core.request import Finished, Request
from mizzen.core.scheduler import Scheduler
from mizzen.core.step_plan import Runner
from mizzen.engine.grammar.pending import POLL_SECONDS, GrammarServices, PendingGrammars
from mizzen.engine.images.pending import ImageFile, ImageServices, PendingImages
from mizzen.engine.images.statistics import ImageStatistics
from mizzen.engine.info import EngineInfo
from mizzen.engine.overlap_loop import OverlapLoop
from mizzen.images.types import ImageRules


class LoadReader(Protocol):
    """Reads the load of experts from the device; see `mizzen.engine.expert_load`."""

    def read(self, now: float) -> ExpertUse:
        """Return how tokens use the experts, as far as it is known."""
        ...


class StepProfiler(Protocol):
    """A runner that can record a trace of its steps."""

    def request_trace(self) -> None:
        """Start a trace with the next step."""
        ...


class Engine:
    """A loaded model with its scheduler and runner; `mizzen.engine.loading.loader.load_engine` creates it.

    `submit`, `abort` and `provide_image` may be called from any thread, all other methods from one thread
    only. A request with a grammar waits outside the scheduler until the grammar is compiled, so it does not
    block other requests.
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: Runner,
        grammars: GrammarServices | None = None,
        profiler: StepProfiler | None = None,
        expert_load: LoadReader | None = None,
        images: ImageServices | None = None,
    ) -> None:
        """Assemble an engine from its loaded parts.

        Args:
            info: Sizes and identity of the engine.
            scheduler: A scheduler that has not been used.
            runner: A runner that has not been used.
            grammars: Compiler and token bitmasks for requests with a grammar. If None, these requests go
                straight to the scheduler, as on a simulated device.
            profiler: The part of `runner` that traces steps, if there is one.
            expert_load: Reader of the load of the model's experts, if it is counted.
            images: Rules and decoder for images; None if the model reads text only.
        """
        self.info = info
        self._expert_load = expert_load
        self._profiler = profiler
        self._loop = OverlapLoop(scheduler, runner)
        self._grammars = PendingGrammars(grammars) if grammars is not None else None
        self._images = PendingImages(images) if images is not None else None
        self._events: deque[Event | ImageFile] = deque()

    @property
    def busy(self) -> bool:
        """Whether requests run or wait, or `submit` or `abort` was called since the last step."""
        return (
            bool(self._events)
            or self._loop.busy
            or (self._grammars is not None and self._grammars.has_waiting)
        )

    def submit(self, request: Request) -> None:
        """Add a request at the next step; if it is rejected, `drain_finished` returns its `Finished`."""
        self._events.append(AddRequest(request))

    def abort(self, rid: int) -> None:
        """Abort a request at the next step; `step` or `drain_finished` then returns its `Finished`."""
        self._events.append(AbortRequest(rid))

    def provide_image(self, file: ImageFile) -> None:
        """Decode an image that `drain_missing_images` named, from the next step on; thread-safe.

        If it cannot be decoded, the request finishes with an error whose message begins with `images:`.
        """
        self._events.append(file)

    def drain_missing_images(self) -> tuple[MissingImages, ...]:
        """Return the images whose files requests need, found since the last call; see `provide_image`."""
        return self._loop.drain_missing_images()

    def step(self, now: float) -> StepOutput | None:
        """Launch steps until the maximum number is in flight, then wait for the oldest step.

        Call `drain_finished` afterwards.

        Args:
            now: Time in seconds, of a monotonic clock.

        Returns:
            The output of the oldest step, or None if no step is in flight.

        Raises:
            StepFailed: The device failed; the engine cannot continue.
        """
        while self._events:
            self._handle_event(self._events.popleft())
        if self._images is None:
            return self._step_with_grammars(now)
        provided, failed = self._images.drain()
        for image in provided:
            self._loop.provide_image(image)
        for rid in failed:
            self._loop.abort(rid)
        output = self._step_with_grammars(now)
        if output is None:
            if self._loop.waits_for_images:
                time.sleep(POLL_SECONDS)
            return None
        if output.finished:
            return replace(output, finished=self._images.finalize(output.finished))
        return output

    def _step_with_grammars(self, now: float) -> StepOutput | None:
        grammars = self._grammars
        if grammars is None or not grammars.active:
            return self._loop.step(now)
        for request in grammars.drain_ready():
            if request.timeline is not None:
                request.timeline.grammar_ready = now
            self._loop.submit(request)
        for rid in grammars.drain_failed():
            self._loop.abort(rid)
        output = self._loop.step(now)
        if output is None:
            if grammars.has_waiting and not self._loop.busy:
                grammars.pause()
            return None
        if output.finished:
            return replace(output, finished=grammars.finalize(output.finished))
        return output

    def drain_finished(self) -> tuple[Finished, ...]:
        """Return the requests that were aborted or rejected since the last call."""
        finished, grammars = self._loop.drain_finished(), self._grammars
        if grammars is not None and grammars.active:
            finished = (*grammars.finalize(finished), *grammars.drain_finished())
        return finished if self._images is None or not finished else self._images.finalize(finished)

    def drain_cache_events(self) -> CacheEvents:
        """Return the KV blocks that entered or left the prefix cache since the last call."""
        return self._loop.drain_cache_events()

    def cache_snapshot(self) -> tuple[int, ...]:
        """Return the hashes of all KV blocks in the prefix cache."""
        return self._loop.cache_snapshot()

    def load(self) -> Load:
        """Return the engine's load; requests whose grammar is being compiled count as waiting."""
        load, grammars = self._loop.load(), self._grammars
        if grammars is None or not grammars.has_waiting:
            return load
        count, tokens = grammars.load()
        return replace(load, waiting=load.waiting + count, waiting_tokens=load.waiting_tokens + tokens)

    def expert_use(self, now: float) -> ExpertUse | None:
        """Return how tokens use the experts; None if they are not counted. See `LoadReader`."""
        return self._expert_load.read(now) if self._expert_load is not None else None

    @property
    def integrity_faults(self) -> int:
        """Number of faults in pages, slots and the prefix tree that `check_integrity` has found so far."""
        return self._loop.integrity_faults

    def drain_integrity_faults(self) -> tuple[str, ...]:
        """Return messages about the first integrity faults (at most 16) found since the last call."""
        return self._loop.drain_integrity_faults()

    @property
    def grammar_counts(self) -> GrammarCounts:
        """Counters of grammar compilation and token bitmasks since the engine was loaded."""
        return self._grammars.counts if self._grammars is not None else GrammarCounts()

    @property
    def image_rules(self) -> ImageRules | None:
        """Rules of the model for images; None if it reads text only."""
        return self._images.rules if self._images is not None else None

    @property
    def image_statistics(self) -> ImageStatistics:
        """Statistics of images since the engine was loaded."""
        return ImageStatistics() if self._images is None else self._images.statistics(self._loop.image_use)

    def profile(self) -> None:
        """Start a trace with the next step; safe in a signal handler.

        Raises:
            ValueError: The engine was loaded without a folder for traces.
        """
        if self._profiler is None:
            raise ValueError("traces need a folder: start the engine with --profile FOLDER")
        self._profiler.request_trace()

    def close(self) -> None:
        """Wait for the steps in flight and free the device."""
        self._loop.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._images is not None:
            self._images.close()

    def _handle_event(self, event: Event | ImageFile) -> None:
        if isinstance(event, AbortRequest):
            if self._grammars is None or not self._grammars.abort_waiting(event.rid):
                self._loop.abort(event.rid)
            return
        if isinstance(event, ImageFile):
            if self._images is not None:
                self._images.decode(event)
            return
        if isinstance(event, ProvideImage):
            self._loop.provide_image(event)
            return
        if self._images is not None and event.request.images:
            self._images.add_request(event.request)
        request: Request | None = event.request
        if self._grammars is not None and event.request.sampling.grammar is not None:
            request = self._grammars.submit(event.request)
        if request is not None:
            self._loop.submit(request)
