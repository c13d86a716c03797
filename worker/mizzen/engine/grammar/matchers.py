"""Matchers by slot: each follows its request's output, and tells which tokens may come next.

A step's masks need the tokens of the step before. They are asked for when the model's work of the step is
enqueued, so that on a GPU the tokens of the step before are read, matched and masked while the model runs:
the draw alone waits for the masks. A row's mask is made anew only where its place in the grammar changed: not
within a long string, and not where one text alone can follow a row that has ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mizzen.core.outputs import GrammarCounts
from mizzen.core.request import Int32, Int64
from mizzen.core.sampling_params import Grammar
from mizzen.engine.grammar.compiled import CompiledGrammar
from mizzen.engine.grammar.limits import GrammarLimits
from mizzen.engine.grammar.mask_threads import Fillers
from mizzen.engine.sampling.token_bitmask import TokenBitmasks

ALL = -1
"""A word of a mask that allows everything."""
FREE = "free"
"""Place of a row that allows everything."""
FIRST_WORDS = 64
"""Of a mask, in which nearly all have some token."""
WATCHED_STEPS = 16
"""After a slow step, rows are timed one by one for so many steps."""

Tokens = Callable[[], NDArray[Any]]
"""Waits for the tokens of a step and returns them, [rows]."""


class OnDevice(Protocol):
    """Knows where the logits are; see `mizzen.engine.execution.slot_state.Uploader`."""

    device: torch.device


@dataclass(slots=True, eq=False)
class Match:
    """A request's place in its grammar."""

    grammar: CompiledGrammar
    matcher: Any
    """`xgrammar.GrammarMatcher`; None once it is through, or has failed."""
    steps: str = ""
    """How far it had come at its last mask, in the matcher's words."""

    def place(self) -> str | None:
        """Return what the next mask follows from, for this request; None when that is not known.

        These are the states from which the parser goes on, each with the position at which its rule began:
        what stands before a position does not change while a request runs.
        """
        state = self.matcher._debug_print_internal_state()
        self.steps, line, states = state.partition("\n")
        if not line or "budget" in states:  # a budget counts tokens, which no state tells
            return None
        return f"{states}{self.matcher.is_completed()}"

    def moved(self) -> bool:
        """Tell whether it has accepted a token since its last mask."""
        if self.matcher.is_terminated():
            return True
        return not self.matcher._debug_print_internal_state().startswith(f"{self.steps}\n")


class GrammarMasks:
    """Matchers of the slots whose requests have a grammar. Used from the thread that runs steps."""

    def __init__(
        self,
        vocab_size: int,
        upload: OnDevice,
        counts: GrammarCounts,
        limits: GrammarLimits | None = None,
        threads: int = 1,
    ) -> None:
        """Take the model's vocabulary, the device, what counts, and threads to fill masks with."""
        rest = vocab_size % 32
        self._tail = np.int32((1 << rest) - 1 if rest else ALL)
        """Bits of the last word that are tokens."""
        self._table = TokenBitmasks(vocab_size, upload.device)
        self._counts = counts
        self._limits = limits or GrammarLimits()
        self._matches: dict[int, Match] = {}
        self._places: dict[int, str | None] = {}
        """What the row of a slot was made from."""
        self._unread: deque[tuple[list[tuple[int, Match]], Tokens]] = deque()
        """Steps whose tokens are not matched yet: rows with their matches."""
        self._faults: deque[tuple[CompiledGrammar, str]] = deque()
        self._fillers: Fillers[tuple[int, Match]] = Fillers(threads)
        self._watch = 0

    @property
    def active(self) -> bool:
        """Tell whether any slot has a grammar."""
        return bool(self._matches)

    def start_slot(self, slot: int, grammar: Grammar, output: Int32) -> None:
        """Let a request take a slot, with the output tokens [n] that it has already."""
        import xgrammar

        if not isinstance(grammar, CompiledGrammar):
            raise TypeError(f"slot {slot} has a grammar that nobody compiled")
        self._places.pop(slot, None)
        self._matches[slot] = match = Match(grammar, xgrammar.GrammarMatcher(grammar.compiled))
        for token in output.tolist():
            if not self._accept(match, token):
                break

    def free_slot(self, slot: int) -> None:
        """Forget a slot's request."""
        self._matches.pop(slot, None)

    def add_launched_step(self, slots: Int64, tokens: Tokens) -> None:
        """Take note of a step that is on its way: `tokens` gives one a slot of `slots` [rows], once read."""
        matches = self._matches
        found = [(row, matches[slot]) for row, slot in enumerate(slots.tolist()) if slot in matches]
        rows = [(row, match) for row, match in found if match.matcher is not None]
        if rows:
            self._unread.append((rows, tokens))

    def update_bitmasks(self, slots: Int64, positions: Int64) -> torch.Tensor:
        """Return which tokens may be drawn; see `mizzen.engine.sampling.logits_params.TokenMasks`."""
        while self._unread:
            rows, tokens = self._unread.popleft()
            self._advance(rows, tokens())
        began = time.perf_counter()
        changed = self._fill(slots.tolist())
        if changed:
            self._table.send_rows(min(changed), max(changed) + 1)
        counts = self._counts
        counts.masks += len(slots)
        counts.mask_seconds += time.perf_counter() - began
        return self._table.device

    def mark_applied(self) -> None:
        """Note that a step's masks are applied; see `mizzen.engine.sampling.logits_params.TokenMasks`."""
        self._table.mark_applied()

    def take_faults(self) -> list[tuple[CompiledGrammar, str]]:
        """Return grammars whose request cannot go on, and why, since the last call. From any thread."""
        faults: list[tuple[CompiledGrammar, str]] = []
        while self._faults:
            faults.append(self._faults.popleft())
        return faults

    def close(self) -> None:
        """End the threads that fill masks."""
        self._fillers.close()

    # ── matching ──────────────────────────────────────────────────────────────────────────────────────────

    def _advance(self, rows: list[tuple[int, Match]], tokens: NDArray[Any]) -> None:
        began, drawn = time.perf_counter(), tokens.tolist()
        follows = [(match, drawn[row]) for row, match in rows if match.matcher is not None]
        if self._watch:
            for match, token in follows:
                self._accept(match, token)
        elif follows:
            self._accept_all(follows)
        took = time.perf_counter() - began
        self._counts.mask_seconds += took
        if took > self._limits.mask_seconds:
            self._watch = WATCHED_STEPS

    def _accept_all(self, follows: list[tuple[Match, int]]) -> None:
        from xgrammar import BatchGrammarMatcher

        matchers, tokens = [match.matcher for match, _ in follows], [token for _, token in follows]
        try:
            accepted = BatchGrammarMatcher.batch_accept_token(matchers, tokens)
        except Exception:  # of one request, after those before it
            for match, token in follows:
                if not match.moved():
                    self._accept(match, token)
                elif match.matcher.is_terminated():
                    match.matcher = None
            return
        for (match, token), well in zip(follows, accepted, strict=True):
            self._accepted(match, token, well)

    def _accept(self, match: Match, token: int) -> bool:
        began = time.thread_time() if self._watch else 0.0
        try:
            accepted = match.matcher.accept_token(token)
        except Exception as error:  # of this request alone, whatever it is
            self._fail(match, str(error))
            return False
        self._accepted(match, token, accepted)
        slow = self._watch and time.thread_time() - began > self._limits.mask_seconds
        if slow and match.matcher is not None:
            self._fail(match, "to follow it takes too long: make it simpler")
        return match.matcher is not None

    def _accepted(self, match: Match, token: int, well: bool) -> None:
        if not well:
            self._fail(match, f"token {token} does not conform to it")
        elif match.matcher.is_terminated():
            match.matcher = None

    def _fail(self, match: Match, reason: str) -> None:
        match.matcher = None
        self._faults.append((match.grammar, f"grammar: {reason}"))

    # ── masks ─────────────────────────────────────────────────────────────────────────────────────────────

    def _fill(self, slots: list[int]) -> list[int]:
        """Bring the rows of slots up to date; return those that changed."""
        places, found = self._places, []
        for slot in slots:
            match = self._matches.get(slot)
            place = FREE if match is None or match.matcher is None else match.place()
            if place is None or places.get(slot) != place:
                places[slot] = place
                found.append((slot, match))
        if not found:
            return []
        self._table.ensure_rows(max(slots) + 1)
        self._table.wait_until_sent()
        host = self._table.host
        rows = [(slot, match) for slot, match in found if match is not None and match.matcher is not None]
        if len(rows) < len(found):
            host[[slot for slot, _ in found if places[slot] == FREE]] = ALL
        began = time.perf_counter()
        self._fillers.run(rows, self._fill_watched if self._watch else self._fill_all)
        self._watch = max(0, self._watch - 1)
        if time.perf_counter() - began > self._limits.mask_seconds:
            self._watch = WATCHED_STEPS
        self._end_stuck(rows)
        return [slot for slot, _ in found]

    def _end_stuck(self, rows: list[tuple[int, Match]]) -> None:
        """End requests whose masks allow no token."""
        if not rows:
            return
        host, filled = self._table.host, [slot for slot, _ in rows]
        host[filled, -1] &= self._tail
        some: list[bool] = np.any(host[filled, :FIRST_WORDS], axis=1).tolist()  # as good as always
        for (slot, match), found in zip(rows, some, strict=True):
            if not found and match.matcher is not None and not np.count_nonzero(host[slot]):
                self._free(slot, match, "no token of this model can come next")

    def _fill_all(self, rows: list[tuple[int, Match]]) -> None:
        """Fill masks. Runs in any thread, for different rows at a time."""
        from xgrammar import BatchGrammarMatcher

        matchers, slots = [match.matcher for _, match in rows], [slot for slot, _ in rows]
        try:
            BatchGrammarMatcher(1).batch_fill_next_token_bitmask(matchers, self._table.host, slots)
        except Exception:  # of one request, which is to be found
            for slot, match in rows:
                self._fill_one(slot, match)

    def _fill_one(self, slot: int, match: Match) -> None:
        try:
            match.matcher.fill_next_token_bitmask(self._table.host, slot)
        except Exception as error:
            self._free(slot, match, str(error))

    def _fill_watched(self, rows: list[tuple[int, Match]]) -> None:
        for slot, match in rows:
            began = time.thread_time()
            self._fill_one(slot, match)
            if match.matcher is not None and time.thread_time() - began > self._limits.mask_seconds:
                text = "to find the tokens that may come next takes too long: make it simpler"
                self._free(slot, match, text)

    def _free(self, slot: int, match: Match, reason: str) -> None:
        """Let a row draw anything, for its request ends."""
        self._table.host[slot] = ALL
        self._places[slot] = FREE
        self._fail(match, reason)
