# SPDX-License-Identifier: Apache-2.0
"""Traced requests of rank 0, from their arrival until their records are written for the supervisor."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterable

from mizzen.core.outputs import StepOutput
from mizzen.core.request import Finished, FinishReason, Request
from mizzen.server.tracing.request_trace import RequestTrace, encode_trace

REMEMBERED_STEPS = 1 << 16
"""Number of latest steps from which the mean batch size of a request can be computed."""


class LiveTraces:
    """The live requests that are traced. For use from the thread of the serving loop; no method waits.

    An engine has this object only if tracing is configured.
    """

    def __init__(self, descriptor: int, on_drop: Callable[[int], None]) -> None:
        """Prepare to write records.

        Args:
            descriptor: write end of the pipe to the supervisor; it is made non-blocking.
            on_drop: called with a number of spans that are lost because the pipe is full.
        """
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._on_drop = on_drop
        self._live: dict[int, Request] = {}
        self._step = 0
        self._tokens = 0
        self._tokens_until = array("q", bytes(8 * REMEMBERED_STEPS))
        """Number of tokens that were generated until a step, at index step % `REMEMBERED_STEPS`."""

    def add(self, requests: Iterable[Request]) -> None:
        """Add the traced ones of the requests that were submitted to the engine."""
        self._live.update((request.rid, request) for request in requests if request.timeline is not None)

    def record_step(self, output: StepOutput, now: float) -> None:
        """Count the tokens of a step, and write the records of the requests that finished with it."""
        self._step = output.step
        self._tokens += len(output.tokens)
        self._tokens_until[output.step % REMEMBERED_STEPS] = self._tokens
        if output.finished and self._live:
            self.finish(output.finished, now)

    def finish(self, ended: Iterable[Finished], now: float) -> None:
        """Write the records of requests that have finished."""
        for end in ended:
            request = self._live.pop(end.rid, None)
            if request is not None:
                self._write(request, end, now)

    def close(self) -> None:
        """Write the records of the requests that the engine leaves unfinished, and close the pipe."""
        now = time.monotonic()
        for rid, request in self._live.items():
            end = Finished(
                rid=rid,
                reason=FinishReason.ERROR,
                prompt_tokens=len(request.prompt) - request.generated,
                cached_tokens=0,
                output_tokens=request.generated,  # the number of tokens since then is unknown here
            )
            self._write(request, end, now)
        self._live.clear()
        os.close(self._descriptor)

    def _write(self, request: Request, end: Finished, now: float) -> None:
        if request.timeline is None:
            return
        trace = RequestTrace(
            timeline=request.timeline,
            ended=now,
            finish_reason=end.reason.name.lower(),
            error=_error(end),
            embeds=request.pooling is not None,
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            output_tokens=max(0, end.output_tokens - request.generated),
            resumed_tokens=request.generated,
            mean_batch=self._mean_batch(request.timeline.first_step),
        )
        try:
            os.write(self._descriptor, encode_trace(trace))
        except (BlockingIOError, BrokenPipeError, ValueError):
            self._on_drop(trace.spans)

    def _mean_batch(self, first_step: int) -> float:
        """Return the mean number of tokens of the steps after `first_step`; 0 if unknown."""
        steps = self._step - first_step
        if not first_step or not 0 < steps < REMEMBERED_STEPS:
            return 0.0
        return (self._tokens - self._tokens_until[first_step % REMEMBERED_STEPS]) / steps


def _error(end: Finished) -> str:
    if end.reason is not FinishReason.ERROR:
        return ""
    if end.refused or end.at_fault:
        return "invalid_request"
    return "busy" if end.busy else "engine_error"
