"""Requests that wait for their grammar to be compiled, before the scheduler hears of them."""

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


@dataclass(frozen=True, slots=True)
class Grammars:
    """What compiles grammars, and what applies them."""

    compiler: GrammarCompiler
    masks: GrammarMasks
    shared: bool = False
    """Others use the compiler too, and close it."""


class GrammarIntake:
    """Holds requests back until their grammar is there. Used from one thread."""

    def __init__(self, grammars: Grammars) -> None:
        self._compiler = grammars.compiler
        self._masks = grammars.masks
        self._shared = grammars.shared
        self._waiting: dict[int, Request] = {}
        """By request id, in the order of arrival."""
        self._running: dict[int, CompiledGrammar] = {}
        self._failed: dict[int, str] = {}
        """Requests that are being ended, and why."""
        self._aborts: list[int] = []
        self._ended: list[Finished] = []

    @property
    def waits(self) -> bool:
        """Tell whether any request waits for its grammar."""
        return bool(self._waiting)

    @property
    def active(self) -> bool:
        """Tell whether any request with a grammar is known: one that waits, runs, or has ended untold."""
        return bool(self._waiting or self._running or self._ended)

    @property
    def counts(self) -> GrammarCounts:
        """What grammars cost so far."""
        return self._compiler.counts

    def load(self) -> tuple[int, int]:
        """Return how many requests wait, and their prompts' tokens."""
        return len(self._waiting), sum(len(request.prompt) for request in self._waiting.values())

    def take(self, request: Request) -> Request | None:
        """Take a request in; returns it with its compiled grammar when that is known already."""
        self._waiting[request.rid] = request
        ready = self._try(request)
        if ready is not None:
            self._compiler.counts.hits += 1
        return ready

    def drop(self, rid: int) -> bool:
        """End a request that waits; False when it does not wait here."""
        request = self._waiting.pop(rid, None)
        if request is None:
            return False
        grammar = request.sampling.grammar
        assert grammar is not None
        if all(other.sampling.grammar != grammar for other in self._waiting.values()):
            self._compiler.forget(grammar)
        self._ended.append(_end(request, FinishReason.ABORT))
        return True

    def ready(self) -> list[Request]:
        """Return the requests whose grammars have come, with them; refused ones go to `take_ended`."""
        found = [self._try(request) for request in list(self._waiting.values())]
        return [request for request in found if request is not None]

    def take_ended(self) -> list[Finished]:
        """Return the requests that ended here since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def failed(self) -> list[int]:
        """Return running requests that cannot follow their grammar any more; they are to be aborted."""
        rids, self._aborts = self._aborts, []
        for grammar, reason in self._masks.take_faults():
            if self._running.get(grammar.rid) is grammar and grammar.rid not in self._failed:
                self._failed[grammar.rid] = reason
                rids.append(grammar.rid)
        return rids

    def settle(self, ended: Iterable[Finished]) -> tuple[Finished, ...]:
        """Take note of ends; returns them, those of failed requests with the reason."""
        self._aborts = self.failed()
        return tuple(self._settle(end) for end in ended)

    def _settle(self, end: Finished) -> Finished:
        self._running.pop(end.rid, None)
        reason = self._failed.pop(end.rid, None)
        if reason is None:
            return end
        if end.rid in self._aborts:
            self._aborts.remove(end.rid)  # the id may be given out again before the abort is taken
        return with_fields(end, reason=FinishReason.ERROR, message=reason, stop_token=None, at_fault=True)

    def pause(self) -> None:
        """Let a moment pass: there is nothing to do but to wait."""
        time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End the threads of masks, and the compiler if no one else has it."""
        self._masks.close()
        if not self._shared:
            self._compiler.close()

    def _try(self, request: Request) -> Request | None:
        grammar = request.sampling.grammar
        assert grammar is not None
        outcome = self._compiler.find(Grammar(grammar.kind, grammar.text), request.tenant)
        if outcome is None:
            return None
        del self._waiting[request.rid]
        if outcome.grammar is None:
            end = _end(request, FinishReason.ERROR, f"grammar: {outcome.fault}")
            self._ended.append(with_fields(end, refused=not outcome.passing, busy=outcome.passing))
            return None
        # A complete text can only be followed by an end token, which must then end the request.
        own = outcome.grammar.for_request(request.rid)
        sampling = replace(request.sampling, grammar=own, ignore_eos=False)
        self._running[request.rid] = own
        return with_fields(request, sampling=sampling)


def _end(request: Request, reason: FinishReason, message: str = "") -> Finished:
    return Finished(
        rid=request.rid,
        reason=reason,
        prompt_tokens=len(request.prompt) - request.generated,
        cached_tokens=0,
        output_tokens=request.generated,
        message=message,
    )
