"""Requests that wait for their grammar to compile, before the scheduler gets them.

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
"""Pause between checks while the engine has nothing to do but wait for a compilation."""


@dataclass(frozen=True, slots=True)
class GrammarServices:
    """Compiler and masks of an engine."""

    compiler: GrammarCompiler
    masks: GrammarMasks
    shared: bool = False
    """Whether other engines use the compiler too, and close it."""


class PendingGrammars:
    """Holds requests back until their grammar is compiled. Used from one thread."""

    def __init__(self, grammars: GrammarServices) -> None:
        self._compiler = grammars.compiler
        self._masks = grammars.masks
        self._shared = grammars.shared
        self._waiting: dict[int, Request] = {}
        """Waiting requests by id, in order of arrival."""
        self._running: dict[int, CompiledGrammar] = {}
        self._failed: dict[int, str] = {}
        """Requests that are being aborted, with the reason."""
        self._aborts: list[int] = []
        self._finished: list[Finished] = []

    @property
    def has_waiting(self) -> bool:
        """Return whether any request waits for its grammar."""
        return bool(self._waiting)

    @property
    def active(self) -> bool:
        """Return whether any request with a grammar waits, runs, or has finished without being reported."""
        return bool(self._waiting or self._running or self._finished)

    @property
    def counts(self) -> GrammarCounts:
        """Compilation and mask costs so far."""
        return self._compiler.counts

    def load(self) -> tuple[int, int]:
        """Return the number of waiting requests and of their prompt tokens."""
        return len(self._waiting), sum(len(request.prompt) for request in self._waiting.values())

    def submit(self, request: Request) -> Request | None:
        """Add a request; return it with its compiled grammar if that is available already."""
        self._waiting[request.rid] = request
        ready = self._attach_grammar(request)
        if ready is not None:
            self._compiler.counts.hits += 1
        return ready

    def abort_waiting(self, rid: int) -> bool:
        """Abort a waiting request; return False if it does not wait here."""
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
        """Return the requests whose grammars are compiled; rejected ones go to `drain_finished`."""
        requests = [self._attach_grammar(request) for request in list(self._waiting.values())]
        return [request for request in requests if request is not None]

    def drain_finished(self) -> list[Finished]:
        """Return the requests that finished here since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def drain_failed(self) -> list[int]:
        """Return running requests that cannot follow their grammar any more; the caller aborts them."""
        rids, self._aborts = self._aborts, []
        for grammar, reason in self._masks.drain_failures():
            if self._running.get(grammar.rid) is grammar and grammar.rid not in self._failed:
                self._failed[grammar.rid] = reason
                rids.append(grammar.rid)
        return rids

    def finalize(self, finished: Iterable[Finished]) -> tuple[Finished, ...]:
        """Process finished requests; return them, failed ones with the reason."""
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
        """Sleep briefly: there is nothing to do but wait."""
        time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Stop the mask threads, and the compiler unless it is shared."""
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
        # After a complete text only an end token is allowed, which must then end the request.
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
