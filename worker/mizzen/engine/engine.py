"""A loaded engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

from mizzen.core.output import CacheEvents, Load, StepOutput
from mizzen.core.plan import Runner
from mizzen.core.request import Finished, Request
from mizzen.core.scheduler import Scheduler
from mizzen.engine.info import EngineInfo
from mizzen.engine.loop import OverlapLoop


class Engine:
    """A scheduler and a device with a model; see `mizzen.engine.build.load_engine`.

    `submit` and `abort` may be called from any thread; the rest from one.
    """

    def __init__(self, info: EngineInfo, scheduler: Scheduler, runner: Runner) -> None:
        self.info = info
        self._loop = OverlapLoop(scheduler, runner)

    @property
    def busy(self) -> bool:
        """Tell whether `step` has anything to do."""
        return self._loop.busy

    def submit(self, request: Request) -> None:
        """Let a request join the queue at the next step; a refusal comes back through `take_ended`."""
        self._loop.submit(request)

    def abort(self, rid: int) -> None:
        """End a request at the next step; its `Finished` follows in a step or in `take_ended`."""
        self._loop.abort(rid)

    def step(self, now: float) -> StepOutput | None:
        """Launch what can be launched and wait for the oldest step; None when nothing is in flight.

        Raises:
            StepFailed: the device failed; the engine cannot go on.
        """
        return self._loop.step(now)

    def take_ended(self) -> tuple[Finished, ...]:
        """Return the requests that ended outside a step since the last call."""
        return tuple(self._loop.take_ended())

    def take_cache_events(self) -> CacheEvents:
        """Return the blocks that entered or left the prefix cache since the last call."""
        return self._loop.take_cache_events()

    def cache_snapshot(self) -> tuple[int, ...]:
        """Return the names of all blocks in the prefix cache."""
        return self._loop.cache_snapshot()

    def load(self) -> Load:
        """Return how busy the engine is."""
        return self._loop.load()

    @property
    def integrity_faults(self) -> int:
        """Faults of pages, slots and prefix tree found so far, by the checks of `check_integrity`."""
        return self._loop.integrity_faults

    def close(self) -> None:
        """Wait for what is in flight and free the device."""
        self._loop.close()
