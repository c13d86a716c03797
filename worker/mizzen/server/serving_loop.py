# SPDX-License-Identifier: Apache-2.0
"""Serving loop of rank 0: receive requests from gateways, step the engine, send its output.

The loop runs in one thread. It iterates at least every `IDLE_SECONDS` unless a step takes longer, so that the
supervisor can recognize a hung loop.
"""

from __future__ import annotations

import enum
import logging
import os
import time
from collections.abc import Sequence

from mizzen.core.outputs import StepOutput
from mizzen.core.request import Finished
from mizzen.server.engine_api import EngineProtocol
from mizzen.server.image_model import image_file
from mizzen.server.metric_catalogue import Phase
from mizzen.server.ranks.rank_status import RankStatus
from mizzen.server.ranks.silence_limit import SilenceLimit
from mizzen.server.tracing.live_traces import LiveTraces
from mizzen.wire.server.engine_server import WireServer

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.5
"""Maximum seconds between two iterations of an idle loop; the supervisor considers a silent loop hung."""
PUBLISH_SECONDS = 0.02
"""Interval in seconds at which the loop of a busy engine publishes load, cache events and counters."""
STALL_SECONDS = 0.001
"""Seconds for which the loop sleeps if the engine is busy but cannot launch a step."""
STRAGGLER_SECONDS = 0.2
"""Time for which a drained engine keeps running to reject requests that were in transit."""


class ControlCommand(bytes, enum.Enum):
    """Command that the supervisor writes to rank 0's control pipe."""

    DRAIN = b"d"
    """Reject new requests and finish the live ones."""
    END = b"e"
    """Drain, then exit; requests that are unfinished after the drain timeout end with an error."""


class SupervisorGone(RuntimeError):
    """Raised when the control pipe is closed because the supervisor has exited."""


class ServingLoop:
    """Loop that connects one engine with one wire server, in one thread."""

    def __init__(
        self,
        engine: EngineProtocol,
        wire: WireServer,
        status: RankStatus,
        control: int,
        drain_timeout_seconds: float,
        traces: LiveTraces | None = None,
    ) -> None:
        """Prepare the loop.

        Args:
            engine: Engine to step.
            wire: Server that exchanges messages with gateways.
            status: Receiver of counters and phases.
            control: Read end of the control pipe; it is made non-blocking.
            drain_timeout_seconds: Time for which unfinished requests may continue after END.
            traces: Receiver of traced requests; None if tracing is off.
        """
        os.set_blocking(control, False)
        self._engine = engine
        self._wire = wire
        self._status = status
        self._control = control
        self._drain_timeout = drain_timeout_seconds
        self._traces = traces
        self._waiting = 0
        self._silence_limit = SilenceLimit()
        self._steps = 0
        self._last_output = 0.0
        self._publish_at = 0.0
        self._draining_since: float | None = None
        self._ending = False

    def run(self) -> None:
        """Serve until the engine has drained after the command END.

        Raises:
            SupervisorGone: the supervisor's end of the control pipe was closed.
            Exception: a step failed.
        """
        while True:
            now = time.monotonic()
            self._iterate(now)
            idle = not self._engine.busy
            if idle or now >= self._publish_at:
                published = self._publish()
                if self._ending and self._drained():
                    return
                if idle:
                    self._last_output = 0.0
                    self._silence_limit.reset()
                    self._wire.wait(self._idle_timeout() if published else PUBLISH_SECONDS, self._control)

    def _iterate(self, now: float) -> None:
        engine, wire = self._engine, self._wire
        arrivals = wire.receive(now, self._waiting)
        for request in arrivals.requests:
            engine.submit(request)
        for rid in arrivals.aborts:
            engine.abort(rid)
        for image in arrivals.images:
            engine.provide_image(image_file(image))
        if arrivals.requests:
            self._silence_limit.reset()
            if self._traces is not None:
                self._traces.add(arrivals.requests)
        if not self._silence_limit.seconds:
            wire.out.withdraw_silence_limit()  # before the step, because nothing can be sent during it
        output = engine.step(now)
        if output is not None:
            self._send_output(output, now)
        elif engine.busy:
            wire.wait(STALL_SECONDS)  # do not spin while no step can be launched
        if arrivals.requests:
            self._waiting = engine.load().waiting
        wire.request_images(engine.drain_missing_images())
        ended = engine.drain_finished()
        if ended:
            ended_at = time.monotonic()
            durations = self._ages(ended, ended_at)
            wire.out.finish(ended, self._steps)
            if self._traces is not None:
                self._traces.finish(ended, ended_at)
            self._status.count_finished(ended, durations)

    def _send_output(self, output: StepOutput, began: float) -> None:
        now = time.monotonic()
        self._steps = output.step
        seconds = now - (self._last_output or began)
        self._status.count_step(seconds, len(output.tokens))
        self._last_output = now
        durations = self._ages(output.finished, now)  # before `send` frees their ids
        live = len(self._wire.out.table)
        first_token_seconds = self._wire.out.send(output, now)
        if self._traces is not None:
            self._traces.record_step(output, now)
        self._silence_limit.record_step(seconds, len(output.rids), len(first_token_seconds), live)
        if len(first_token_seconds):
            self._status.count_first_tokens(first_token_seconds)
        # A decoding request gets a token in every step, so the step's duration is its inter-token latency.
        later_tokens = len(output.rids) - (len(first_token_seconds) - len(output.side_outputs.vectors))
        if later_tokens > 0:
            self._status.count_later_tokens(seconds, later_tokens)
        if output.finished:
            self._status.count_finished(output.finished, durations)

    def _ages(self, ends: Sequence[Finished], now: float) -> list[float]:
        """Return the seconds since the arrival of each finished request.

        The ids of the requests must still be in the wire's request table.
        """
        arrival = self._wire.out.table.arrival
        return [float(now - arrival[end.rid]) for end in ends]

    def _publish(self) -> bool:
        """Handle commands, and publish load, cache events and status.

        Return False if the load has changed too soon after the last message to gateways, so that this method
        must be called again soon.
        """
        now = time.monotonic()
        self._publish_at = now + PUBLISH_SECONDS
        self._handle_commands(now)
        engine = self._engine
        load = engine.load()
        self._waiting = load.waiting
        self._wire.out.blocks(engine.drain_cache_events())
        published = self._wire.out.stats(load, self._steps, now, self._silence_limit.seconds)
        for fault in engine.drain_integrity_faults():
            log.error("integrity check failed", extra={"fields": {"fault": fault}})
        self._status.set_expert_use(engine.expert_use(now))
        self._status.set_images(self._wire.out.counters, engine.image_statistics)
        self._status.publish(load, self._wire.out, engine.integrity_faults, engine.grammar_counts, now)
        return published

    def _handle_commands(self, now: float) -> None:
        try:
            commands = os.read(self._control, 16)
        except BlockingIOError:
            return
        if not commands:
            raise SupervisorGone("the supervisor is gone")
        if self._draining_since is None:
            self._draining_since = now
            self._wire.out.drain()
            self._status.enter_phase(Phase.DRAINING)
            log.info("draining", extra={"fields": {"requests": len(self._wire.out.table)}})
        if ControlCommand.END in commands and not self._ending:
            self._ending = True
            self._draining_since = now

    def _drained(self) -> bool:
        since = self._draining_since or 0.0
        drained_for = time.monotonic() - since
        left = len(self._wire.out.table)
        if not left:
            return drained_for >= min(STRAGGLER_SECONDS, self._drain_timeout)
        if drained_for < self._drain_timeout:
            return False
        log.warning("drain timeout", extra={"fields": {"cut_requests": left}})
        self._wire.out.end_all(self._steps, "the engine was shut down before the answer was complete")
        return True

    def _idle_timeout(self) -> float:
        """Return the seconds for which an idle loop may sleep."""
        if self._ending:
            return STRAGGLER_SECONDS / 4
        due = self._wire.next_timeout()
        return IDLE_SECONDS if due is None else min(IDLE_SECONDS, max(0.0, due - time.monotonic()))
