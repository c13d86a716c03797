# SPDX-License-Identifier: Apache-2.0
"""Holds requests until their grammars are compiled; only then do the requests go to the scheduler.

`Engine` submits requests with a grammar here, and passes every `Finished` through `finalize`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as with_fields

from mizzen.core.outputs import GrammarCounts
from mizzen.core.request import Finished, FinishReason, Request
from mizzen.core.sampling_params import Grammar
from mizzen.engine.grammar.compile_service import GrammarCompiler
from mizzen.engine.grammar.compiled import CompiledGrammar

if TYPE_CHECKING:  # simulated engines have no masks, and would wait for torch
    from mizzen.engine.grammar.matchers import GrammarMasks

POLL_SECONDS = 0.001
"""Pause in seconds between two steps of the engine while it has no work except waiting for compilations."""


@dataclass(frozen=True, slots=True)
class GrammarServices:
    """Grammar compiler and token bitmasks of an engine."""

    compiler: GrammarCompiler
    masks: GrammarMasks
    shared: bool = False
    """Whether other engines use the compiler too, so that this engine must not close it."""


class PendingGrammars:
    """Requests whose grammars are being compiled, and running requests with grammars.

    Used from one thread.
    """

    def __init__(self, grammars: GrammarServices) -> None:
        self._compiler = grammars.compiler
        self._masks = grammars.masks
        self._shared = grammars.shared
        self._waiting: dict[int, Request] = {}
        """Waiting requests by id, in order of arrival."""
        self._running: dict[int, CompiledGrammar] = {}
        """Grammars of requests that were passed to the scheduler, by request id."""
        self._failed: dict[int, str] = {}
        """Error messages of running requests that failed and are being aborted, by request id."""
        self._aborts: list[int] = []
        """Ids of failed requests that the next `drain_failed` returns."""
        self._finished: list[Finished] = []
        """Results for the next `drain_finished`."""

    @property
    def has_waiting(self) -> bool:
        """Whether any request waits for its grammar."""
        return bool(self._waiting)

    @property
    def active(self) -> bool:
        """Whether any request with a grammar waits, runs, or has a result that was not drained."""
        return bool(self._waiting or self._running or self._finished)

    @property
    def counts(self) -> GrammarCounts:
        """Counters of compilation and token bitmasks since the engine started."""
        return self._compiler.counts

    def load(self) -> tuple[int, int]:
        """Return the number of waiting requests, and the total number of their prompt tokens."""
        return len(self._waiting), sum(len(request.prompt) for request in self._waiting.values())

    def submit(self, request: Request) -> Request | None:
        """Return the request with its compiled grammar if the grammar is cached; otherwise hold the request.

        Returns None if the request waits, or was rejected (see `drain_finished`).
        """
        self._waiting[request.rid] = request
        ready = self._attach_grammar(request)
        if ready is not None:
            self._compiler.counts.hits += 1
        return ready

    def abort_waiting(self, rid: int) -> bool:
        """Abort a waiting request; return False if no such request waits here."""
        request = self._waiting.pop(rid, None)
        if request is None:
            return False
        grammar = request.sampling.grammar
        assert grammar is not None
        if all(other.sampling.grammar != grammar for other in self._waiting.values()):
            self._compiler.cancel(grammar)
        self._finished.append(_finished_result(request, FinishReason.ABORT))
        return True

    def drain_ready(self) -> list[Request]:
        """Return the waiting requests whose grammars are compiled now.

        Requests whose grammars were rejected are returned by `drain_finished`.
        """
        requests = [self._attach_grammar(request) for request in list(self._waiting.values())]
        return [request for request in requests if request is not None]

    def drain_finished(self) -> list[Finished]:
        """Return the requests that were aborted or rejected here since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def drain_failed(self) -> list[int]:
        """Return the ids of running requests that failed since the last call; the caller must abort them."""
        rids, self._aborts = self._aborts, []
        for grammar, reason in self._masks.drain_failures():
            if self._running.get(grammar.rid) is grammar and grammar.rid not in self._failed:
                self._failed[grammar.rid] = reason
                rids.append(grammar.rid)
        return rids

    def finalize(self, finished: Iterable[Finished]) -> tuple[Finished, ...]:
        """Forget finished requests and return their results, with an error message for each that failed."""
        self._aborts = self.drain_failed()
        return tuple(self._finalize(request) for request in finished)

    def _finalize(self, finished: Finished) -> Finished:
        self._running.pop(finished.rid, None)
        reason = self._failed.pop(finished.rid, None)
        if reason is None:
            return finished
        if finished.rid in self._aborts:
            self._aborts.remove(finished.rid)  # the id may be reused before the abort is handled
        return with_fields(
            finished, reason=FinishReason.ERROR, message=reason, stop_token=None, at_fault=True
        )

    def pause(self) -> None:
        """Sleep for POLL_SECONDS; called if the engine has no work except waiting for compilations."""
        time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Stop the threads that fill masks, and close the compiler unless it is shared."""
        self._masks.close()
        if not self._shared:
            self._compiler.close()

    def _attach_grammar(self, request: Request) -> Request | None:
        grammar = request.sampling.grammar
        assert grammar is not None
        result = self._compiler.find_or_compile(Grammar(grammar.kind, grammar.text), request.tenant)
        if result is None:
            return None
        del self._waiting[request.rid]
        if result.grammar is None:
            end = _finished_result(request, FinishReason.ERROR, f"grammar: {result.error}")
            self._finished.append(with_fields(end, refused=not result.temporary, busy=result.temporary))
            return None
        # After a complete text the grammar only allows an end token, so that token must end the request.
        request_grammar = result.grammar.for_request(request.rid)
        sampling = replace(request.sampling, grammar=request_grammar, ignore_eos=False)
        self._running[request.rid] = request_grammar
        return with_fields(request, sampling=sampling)


def _finished_result(request: Request, reason: FinishReason, message: str = "") -> Finished:
    return Finished(
        rid=request.rid,
        reason=reason,
        prompt_tokens=len(request.prompt) - request.generated,
        cached_tokens=0,
        output_tokens=request.generated,
        message=message,
    )
