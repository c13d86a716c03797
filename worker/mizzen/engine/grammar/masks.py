"""Matchers by slot: each follows its request's output, and tells which tokens may come next.

A step's masks need the tokens of the step before. They are asked for when the model's work of the step is
enqueued, so that on a GPU the tokens of the step before are read, matched and masked while the model runs:
the draw alone waits for the masks.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mizzen.core.output import GrammarCounts
from mizzen.core.params import Grammar
from mizzen.core.request import Int32, Int64
from mizzen.engine.grammar.compiled import CompiledGrammar
from mizzen.engine.grammar.limits import GrammarLimits

if TYPE_CHECKING:
    import torch

ALL = -1
"""A word of a mask that allows everything."""
WATCHED_STEPS = 16
"""After a slow step, rows are timed one by one for so many steps."""

FEW_ROWS = 12
"""Up to so many masks are filled one after the other: to hand them to threads takes longer."""

Tokens = Callable[[], NDArray[Any]]
"""Waits for the tokens of a step and returns them, [rows]."""


class Upload(Protocol):
    """Brings host arrays to the device; see `mizzen.engine.state.Uploader`."""

    def __call__(self, array: NDArray[Any]) -> torch.Tensor: ...  # noqa: D102


@dataclass(slots=True)
class Match:
    """A request's place in its grammar."""

    grammar: CompiledGrammar
    matcher: Any
    """`xgrammar.GrammarMatcher`; None once it is through, or has failed."""


class GrammarMasks:
    """Matchers of the slots whose requests have a grammar. Used from the thread that runs steps."""

    def __init__(
        self, vocab_size: int, upload: Upload, counts: GrammarCounts, limits: GrammarLimits | None = None
    ) -> None:
        self._words = -(-vocab_size // 32)
        rest = vocab_size % 32
        self._tail = np.int32((1 << rest) - 1 if rest else ALL)
        """Bits of the last word that are tokens."""
        self._upload = upload
        self._counts = counts
        self._limits = limits or GrammarLimits()
        self._matches: dict[int, Match] = {}
        self._unread: deque[tuple[list[tuple[int, Match]], Tokens]] = deque()
        """Steps whose tokens are not matched yet: rows with their matches."""
        self._faults: deque[tuple[CompiledGrammar, str]] = deque()
        self._buffer: Int32 = np.empty((0, self._words), np.int32)
        self._batch: Any = None
        self._watch = 0

    @property
    def active(self) -> bool:
        """Tell whether any slot has a grammar."""
        return bool(self._matches)

    def start(self, slot: int, grammar: Grammar, output: Int32) -> None:
        """Let a request take a slot, with the output tokens [n] that it has already."""
        import xgrammar

        if not isinstance(grammar, CompiledGrammar):
            raise TypeError(f"slot {slot} has a grammar that nobody compiled")
        if self._batch is None:
            threads = max(1, min(8, (os.cpu_count() or 1) // 2))
            self._batch = xgrammar.BatchGrammarMatcher(max_threads=threads)
        self._matches[slot] = match = Match(grammar, xgrammar.GrammarMatcher(grammar.compiled))
        for token in output.tolist():
            if not self._accept(match, token):
                break

    def release(self, slot: int) -> None:
        """Forget a slot's request."""
        self._matches.pop(slot, None)

    def sampled(self, slots: Int64, tokens: Tokens) -> None:
        """Take note of a step that is on its way: `tokens` gives one a slot of `slots` [rows], once read."""
        found = ((row, self._matches.get(slot)) for row, slot in enumerate(slots.tolist()))
        rows = [(row, match) for row, match in found if match is not None and match.matcher is not None]
        if rows:
            self._unread.append((rows, tokens))

    def bits(self, slots: Int64, positions: Int64) -> torch.Tensor:
        """Return which tokens may be drawn; see `mizzen.engine.asks.TokenMasks`."""
        while self._unread:
            rows, tokens = self._unread.popleft()
            self._advance(rows, tokens())
        began = time.perf_counter()
        if len(slots) > len(self._buffer):
            self._buffer = np.empty((max(8, 2 * len(slots)), self._words), np.int32)
        mask = self._buffer[: len(slots)]
        self._fill(slots, mask)
        counts = self._counts
        counts.masks += len(slots)
        counts.mask_seconds += time.perf_counter() - began
        return self._upload(mask)

    def take_faults(self) -> list[tuple[CompiledGrammar, str]]:
        """Return grammars whose request cannot go on, and why, since the last call. From any thread."""
        faults: list[tuple[CompiledGrammar, str]] = []
        while self._faults:
            faults.append(self._faults.popleft())
        return faults

    # ── matching ──────────────────────────────────────────────────────────────────────────────────────────

    def _advance(self, rows: list[tuple[int, Match]], tokens: NDArray[Any]) -> None:
        began = time.perf_counter()
        for row, match in rows:
            if match.matcher is not None:
                self._accept(match, int(tokens[row]))
        if time.perf_counter() - began > self._limits.mask_seconds:
            self._watch = WATCHED_STEPS

    def _accept(self, match: Match, token: int) -> bool:
        began = time.thread_time() if self._watch else 0.0
        try:
            accepted = match.matcher.accept_token(token)
        except Exception as error:  # of this request alone, whatever it is
            self._fail(match, str(error))
            return False
        if not accepted:
            self._fail(match, f"token {token} does not conform to it")
        elif match.matcher.is_terminated():
            match.matcher = None
        elif self._watch and time.thread_time() - began > self._limits.mask_seconds:
            self._fail(match, "to follow it takes too long: make it simpler")
        return match.matcher is not None

    def _fail(self, match: Match, reason: str) -> None:
        match.matcher = None
        self._faults.append((match.grammar, f"grammar: {reason}"))

    # ── masks ─────────────────────────────────────────────────────────────────────────────────────────────

    def _fill(self, slots: Int64, mask: Int32) -> None:
        found = [(row, self._matches.get(slot)) for row, slot in enumerate(slots.tolist())]
        rows = [(row, match) for row, match in found if match is not None and match.matcher is not None]
        if len(rows) < len(slots):
            mask.fill(ALL)
        began = time.perf_counter()
        if len(rows) > FEW_ROWS and not self._watch and self._fill_together(rows, mask):
            if time.perf_counter() - began > self._limits.mask_seconds:
                self._watch = WATCHED_STEPS
        else:
            self._watch = max(0, self._watch - 1)
            for row, match in rows:
                self._fill_one(row, match, mask)
        mask[:, -1] &= self._tail
        impossible = np.flatnonzero(~mask.any(axis=1))
        if len(impossible):
            matches = dict(rows)
            for row in impossible.tolist():
                mask[row] = ALL
                self._fail(matches[row], "no token of this model can come next")

    def _fill_together(self, rows: list[tuple[int, Match]], mask: Int32) -> bool:
        """Fill the masks in several threads; False when one of them failed."""
        try:
            self._batch.batch_fill_next_token_bitmask(
                [match.matcher for _, match in rows], mask, [row for row, _ in rows]
            )
        except Exception:  # found again by its row
            return False
        return True

    def _fill_one(self, row: int, match: Match, mask: Int32) -> None:
        began = time.thread_time()
        try:
            match.matcher.fill_next_token_bitmask(mask, row)
        except Exception as error:
            mask[row] = ALL
            self._fail(match, str(error))
            return
        if time.thread_time() - began > self._limits.mask_seconds:
            mask[row] = ALL
            self._fail(match, "to find the tokens that may come next takes too long: make it simpler")
