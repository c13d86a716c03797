# SPDX-License-Identifier: Apache-2.0
"""Grammar matchers by slot: each follows the output of a request, and fills the bitmask of allowed tokens.

The bitmasks (masks) of a step depend on the tokens of the previous step. They are filled after the model's
work of the step is enqueued. So on a GPU, the host reads and matches the previous tokens and fills the masks
while the model runs; only sampling waits for them. A row's mask is filled again only if the state of its
grammar changed, which is not the case within a long string or after the grammar is complete.
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
from mizzen.engine.grammar.mask_threads import MaskThreads
from mizzen.engine.sampling.token_bitmask import TokenBitmasks

ALL_TOKENS = -1
"""Mask word that allows all of its tokens."""
UNCONSTRAINED = "free"
"""Mask key of a row that allows every token."""
SCANNED_WORDS = 64
"""Number of leading mask words to check first for an allowed token; nearly all masks have one there."""
TIMED_STEPS = 16
"""Number of steps after a slow step in which each row is timed separately, to find the slow request."""

WaitForTokens = Callable[[], NDArray[Any]]
"""Waits for the tokens of a step, and returns them, [rows]."""


class OnDevice(Protocol):
    """An object that knows the device of the logits, such as `mizzen.engine.uploader.Uploader`."""

    device: torch.device


@dataclass(slots=True, eq=False)
class RequestMatcher:
    """A request's grammar and the state of its matcher."""

    grammar: CompiledGrammar
    matcher: Any
    """`xgrammar.GrammarMatcher`; None after the grammar is complete or the request failed."""
    position: str = ""
    """First line of the matcher's debug output when `mask_key` was last called; it gives the number of
    accepted tokens."""

    def mask_key(self) -> str | None:
        """Return a key of the matcher's state: as long as the key is the same, so is the mask.

        The key consists of the parser's active states, each with the position in the output at which its rule
        began. The text before such a position does not change while a request runs. Returns None if these
        states do not determine the mask.
        """
        state = self.matcher._debug_print_internal_state()
        self.position, line, states = state.partition("\n")
        if not line or "budget" in states:  # a budget counts tokens, which the states do not show
            return None
        return f"{states}{self.matcher.is_completed()}"

    def has_advanced(self) -> bool:
        """Return whether the matcher has accepted a token since the last call of `mask_key`."""
        if self.matcher.is_terminated():
            return True
        return not self.matcher._debug_print_internal_state().startswith(f"{self.position}\n")


class GrammarMasks:
    """Matchers and masks of the slots whose requests have a grammar; used from the thread that runs steps."""

    def __init__(
        self,
        vocab_size: int,
        upload: OnDevice,
        counts: GrammarCounts,
        limits: GrammarLimits | None = None,
        threads: int = 1,
    ) -> None:
        """Create the masks of a model.

        Args:
            vocab_size: Size of the model's vocabulary.
            upload: Object whose `device` is the device of the logits.
            counts: Counters to update.
            limits: Limits on matching; the defaults if None.
            threads: Number of threads that fill masks.
        """
        tail_bits = vocab_size % 32
        self._last_word_bits = np.int32((1 << tail_bits) - 1 if tail_bits else ALL_TOKENS)
        """Value of the last mask word if all tokens are allowed; bits without a token are 0."""
        self._bitmasks = TokenBitmasks(vocab_size, upload.device)
        self._counts = counts
        self._limits = limits or GrammarLimits()
        self._matchers: dict[int, RequestMatcher] = {}
        self._mask_keys: dict[int, str | None] = {}
        """For each slot, the mask key for which its row was last filled."""
        self._unread_steps: deque[tuple[list[tuple[int, RequestMatcher]], WaitForTokens]] = deque()
        """Launched steps whose tokens are not matched yet.

        Each entry holds the rows of a step with their matchers, and a function that waits for the tokens."""
        self._failures: deque[tuple[CompiledGrammar, str]] = deque()
        self._threads: MaskThreads[tuple[int, RequestMatcher]] = MaskThreads(threads)
        self._timed_steps_left = 0

    @property
    def active(self) -> bool:
        """Whether any slot has a request with a grammar."""
        return bool(self._matchers)

    def start_slot(self, slot: int, grammar: Grammar, output: Int32) -> None:
        """Start a request in a slot, and match the output tokens that it already has, int32 [n].

        Raises:
            TypeError: The grammar is not a `CompiledGrammar`.
        """
        import xgrammar

        if not isinstance(grammar, CompiledGrammar):
            raise TypeError(f"slot {slot} has a grammar that was not compiled")
        self._mask_keys.pop(slot, None)
        self._matchers[slot] = match = RequestMatcher(grammar, xgrammar.GrammarMatcher(grammar.compiled))
        for token in output.tolist():
            if not self._accept(match, token):
                break

    def free_slot(self, slot: int) -> None:
        """Drop the matcher of a slot."""
        self._matchers.pop(slot, None)

    def add_launched_step(self, slots: Int64, tokens: WaitForTokens) -> None:
        """Record a launched step that samples one token for each of `slots` [rows].

        `tokens` waits for the step and returns these tokens, [rows].
        """
        matches = self._matchers
        matched = [(row, matches[slot]) for row, slot in enumerate(slots.tolist()) if slot in matches]
        rows = [(row, match) for row, match in matched if match.matcher is not None]
        if rows:
            self._unread_steps.append((rows, tokens))

    def update_bitmasks(self, slots: Int64, positions: Int64) -> torch.Tensor:
        """Match the tokens of earlier steps, and return the masks; see `TokenMasks.update_bitmasks`."""
        while self._unread_steps:
            rows, tokens = self._unread_steps.popleft()
            self._advance(rows, tokens())
        start_time = time.perf_counter()
        changed = self._update_rows(slots.tolist())
        if changed:
            self._bitmasks.send_rows(min(changed), max(changed) + 1)
        counts = self._counts
        counts.masks += len(slots)
        counts.mask_seconds += time.perf_counter() - start_time
        return self._bitmasks.device

    def mark_applied(self) -> None:
        """Record that all work that reads the masks of a step is enqueued."""
        self._bitmasks.mark_applied()

    def drain_failures(self) -> list[tuple[CompiledGrammar, str]]:
        """Return grammars and error messages of requests that failed since the last call; thread-safe."""
        failures: list[tuple[CompiledGrammar, str]] = []
        while self._failures:
            failures.append(self._failures.popleft())
        return failures

    def close(self) -> None:
        """Stop the threads that fill masks."""
        self._threads.close()

    # ── matching ──────────────────────────────────────────────────────────────────────────────────────────

    def _advance(self, rows: list[tuple[int, RequestMatcher]], tokens: NDArray[Any]) -> None:
        start_time, sampled = time.perf_counter(), tokens.tolist()
        accepting = [(match, sampled[row]) for row, match in rows if match.matcher is not None]
        if self._timed_steps_left:
            for match, token in accepting:
                self._accept(match, token)
        elif accepting:
            self._accept_all(accepting)
        elapsed = time.perf_counter() - start_time
        self._counts.mask_seconds += elapsed
        if elapsed > self._limits.mask_seconds:
            self._timed_steps_left = TIMED_STEPS

    def _accept_all(self, accepting: list[tuple[RequestMatcher, int]]) -> None:
        from xgrammar import BatchGrammarMatcher

        matchers, tokens = [match.matcher for match, _ in accepting], [token for _, token in accepting]
        try:
            accepted = BatchGrammarMatcher.batch_accept_token(matchers, tokens)
        except Exception:  # one request failed; the requests before it have advanced
            for match, token in accepting:
                if not match.has_advanced():
                    self._accept(match, token)
                elif match.matcher.is_terminated():
                    match.matcher = None
            return
        for (match, token), conforms in zip(accepting, accepted, strict=True):
            self._after_token(match, token, conforms)

    def _accept(self, match: RequestMatcher, token: int) -> bool:
        start_time = time.thread_time() if self._timed_steps_left else 0.0
        try:
            accepted = match.matcher.accept_token(token)
        except Exception as error:  # any error fails only this request
            self._fail(match, str(error))
            return False
        self._after_token(match, token, accepted)
        slow = self._timed_steps_left and time.thread_time() - start_time > self._limits.mask_seconds
        if slow and match.matcher is not None:
            self._fail(match, "matching a token takes too long: make it simpler")
        return match.matcher is not None

    def _after_token(self, match: RequestMatcher, token: int, conforms: bool) -> None:
        if not conforms:
            self._fail(match, f"token {token} does not conform to it")
        elif match.matcher.is_terminated():
            match.matcher = None

    def _fail(self, match: RequestMatcher, reason: str) -> None:
        match.matcher = None
        self._failures.append((match.grammar, f"grammar: {reason}"))

    # ── masks ─────────────────────────────────────────────────────────────────────────────────────────────

    def _update_rows(self, slots: list[int]) -> list[int]:
        """Fill the rows of those slots whose mask may have changed; return these slots."""
        mask_keys, changed = self._mask_keys, []
        for slot in slots:
            match = self._matchers.get(slot)
            key = UNCONSTRAINED if match is None or match.matcher is None else match.mask_key()
            if key is None or mask_keys.get(slot) != key:
                mask_keys[slot] = key
                changed.append((slot, match))
        if not changed:
            return []
        self._bitmasks.ensure_rows(max(slots) + 1)
        self._bitmasks.wait_until_sent()
        host = self._bitmasks.host
        rows = [(slot, match) for slot, match in changed if match is not None and match.matcher is not None]
        if len(rows) < len(changed):
            host[[slot for slot, _ in changed if mask_keys[slot] == UNCONSTRAINED]] = ALL_TOKENS
        start_time = time.perf_counter()
        self._threads.fill_rows(rows, self._fill_timed if self._timed_steps_left else self._fill_all)
        self._timed_steps_left = max(0, self._timed_steps_left - 1)
        if time.perf_counter() - start_time > self._limits.mask_seconds:
            self._timed_steps_left = TIMED_STEPS
        self._end_dead_ends(rows)
        return [slot for slot, _ in changed]

    def _end_dead_ends(self, rows: list[tuple[int, RequestMatcher]]) -> None:
        """Fail each request whose mask allows no token at all."""
        if not rows:
            return
        host, filled = self._bitmasks.host, [slot for slot, _ in rows]
        host[filled, -1] &= self._last_word_bits
        any_allowed: list[bool] = np.any(host[filled, :SCANNED_WORDS], axis=1).tolist()
        for (slot, match), allowed in zip(rows, any_allowed, strict=True):
            if not allowed and match.matcher is not None and not np.count_nonzero(host[slot]):
                self._fail_unconstrained(slot, match, "no token of this model can come next")

    def _fill_all(self, rows: list[tuple[int, RequestMatcher]]) -> None:
        """Fill the masks of a batch of rows; several threads may do so at once, for different rows."""
        from xgrammar import BatchGrammarMatcher

        matchers, slots = [match.matcher for _, match in rows], [slot for slot, _ in rows]
        try:
            BatchGrammarMatcher(1).batch_fill_next_token_bitmask(matchers, self._bitmasks.host, slots)
        except Exception:  # one request failed: fill one by one to find out which
            for slot, match in rows:
                self._fill_one(slot, match)

    def _fill_one(self, slot: int, match: RequestMatcher) -> None:
        try:
            match.matcher.fill_next_token_bitmask(self._bitmasks.host, slot)
        except Exception as error:
            self._fail_unconstrained(slot, match, str(error))

    def _fill_timed(self, rows: list[tuple[int, RequestMatcher]]) -> None:
        for slot, match in rows:
            start_time = time.thread_time()
            self._fill_one(slot, match)
            if match.matcher is not None and time.thread_time() - start_time > self._limits.mask_seconds:
                text = "finding the next allowed tokens takes too long: make it simpler"
                self._fail_unconstrained(slot, match, text)

    def _fail_unconstrained(self, slot: int, match: RequestMatcher, reason: str) -> None:
        """Fail a request, and allow all tokens in its row until the request is aborted."""
        self._bitmasks.host[slot] = ALL_TOKENS
        self._mask_keys[slot] = UNCONSTRAINED
        self._fail(match, reason)
