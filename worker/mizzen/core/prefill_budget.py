# SPDX-License-Identifier: Apache-2.0
"""Adaptive prefill token budget: limits the prompt tokens of steps that also decode."""

from __future__ import annotations

import math

from mizzen.core.config import SchedulerConfig

_NEWEST_WEIGHT = 0.5
"""Weight of the newest sample in the exponential mean of an `Estimate`."""
_MIN_TOKENS = 16
"""Minimum budget in tokens (one page, if that is larger), regardless of the duration of steps."""
_MIN_SHARE = 0.25
"""Minimum time for prefill in a step, as a share of the duration of a decode-only step."""
_TRUSTED_TOKENS = 256
"""Budget in tokens up to which the estimates are trusted. A larger budget must not exceed 1.5 times the
number of prompt tokens of the newest mixed step."""
_SMALL_BUDGET_TOKENS = 64
"""A budget of at most this number of tokens may starve prefill. If the budget is that small and the
decode-only estimate is stale, decode-only steps are inserted to measure their duration."""
_REFRESH_STEPS = 4
"""Number of consecutive decode-only steps that refresh the estimate of their duration."""
_STALE_STEPS = 32
"""Number of mixed steps after which the decode-only estimate at first counts as stale.

The number is doubled whenever a new measurement confirms the estimate."""
_MAX_STALE_STEPS = 256
"""Upper bound of the number of mixed steps after which the decode-only estimate counts as stale."""


class Estimate:
    """Exponentially weighted mean of the running median of the last three samples.

    The estimate ignores a single outlier and quickly follows a lasting change.
    """

    __slots__ = ("_high", "_last", "_low", "value")

    def __init__(self) -> None:
        self.value = 0.0
        """The estimate; 0 before the first sample."""
        self._low = self._high = self._last = 0.0
        """The smaller, the larger and the newer of the last two samples."""

    def add(self, sample: float) -> None:
        """Update the estimate with a sample in seconds."""
        low, high, last = self._low, self._high, self._last
        middle = low if sample < low else high if sample > high else sample
        self._low, self._high = (last, sample) if last < sample else (sample, last)
        self._last = sample
        self.value = self.value + (middle - self.value) * _NEWEST_WEIGHT if self.value else sample


class PrefillBudget:
    """Limits the prompt tokens of mixed steps so that their duration stays near `max_step_milliseconds`.

    A mixed step contains both prefill and decodes. It is assumed to take as long as a decode-only step plus a
    constant time per prompt token. While every step contains prefill, the duration of decode-only steps
    cannot be measured, and its estimate becomes stale. If the stale estimate could starve prefill or decodes,
    a few decode-only steps are inserted. The budget reads no clock: it depends only on calls of
    `record_step`.
    """

    __slots__ = (
        "_completed_at", "_decode_only_steps", "_limit", "_max_tokens", "_min_tokens", "_mixed_step_tokens",
        "_mixed_steps", "_page", "_previous_decode_step", "_stale_after", "decode_step", "prompt_token",
    )  # fmt: skip

    def __init__(self, config: SchedulerConfig) -> None:
        limit = config.max_step_milliseconds
        self._limit = None if limit in (None, math.inf) else limit / 1e3
        self._max_tokens = config.prefill_chunk_tokens
        self._page = config.page_size
        self._min_tokens = min(max(self._page, _MIN_TOKENS), self._max_tokens)
        self._mixed_step_tokens = 0
        """Number of prompt tokens of the last completed mixed step."""
        self._completed_at = 0.0
        """Time in seconds at which the last step completed."""
        self._mixed_steps = 0
        """Number of mixed steps since the decode-only estimate was last refreshed."""
        self._decode_only_steps = 0
        """Number of decode-only steps since the last mixed step."""
        self._previous_decode_step = 0.0
        """Value that `decode_step` had before the first decode-only step after the last mixed step."""
        self._stale_after = _STALE_STEPS
        """Number of mixed steps after which the decode-only estimate counts as stale."""
        self.decode_step = Estimate()
        """Estimated seconds of a decode-only step."""
        self.prompt_token = Estimate()
        """Estimated seconds that one prompt token adds to a step."""

    def tokens(self, decodes: bool) -> int:
        """Return the maximum number of prompt tokens of the next step.

        Returns 0 to insert a decode-only step.

        Args:
            decodes: whether the step contains decodes. If not, the result is `prefill_chunk_tokens`.
        """
        if self._limit is None or not decodes:
            return self._max_tokens
        left, share = self._limit - self.decode_step.value, self.decode_step.value * _MIN_SHARE
        available = max(left, share)
        tokens = max(
            _TRUSTED_TOKENS, self._mixed_step_tokens + self._mixed_step_tokens // 2, self._min_tokens
        )
        cost = self.prompt_token.value
        if cost * tokens > available:
            tokens = max(int(available / cost), self._min_tokens)
        if self._mixed_steps >= self._stale_after and (tokens <= _SMALL_BUDGET_TOKENS or left < share):
            return 0
        if tokens >= self._max_tokens:
            return self._max_tokens
        return tokens - tokens % self._page

    def record_step(self, launched: float, now: float, prompt_tokens: int, decodes: bool) -> None:
        """Update the estimates with the duration of a completed step.

        The duration is measured from the step's launch or the previous step's completion, whichever is later.

        Args:
            launched: time of launch in seconds.
            now: time of completion in seconds, on the same clock.
            prompt_tokens: number of prompt tokens of the step.
            decodes: whether the step contained decodes.
        """
        seconds = now - (launched if launched > self._completed_at else self._completed_at)
        self._completed_at = now
        if self._limit is None or seconds < 0:
            return
        if not prompt_tokens:
            self._learn_decode_step(seconds)
            return
        if decodes:
            self._mixed_step_tokens = prompt_tokens
            self._mixed_steps += 1
            self._decode_only_steps = 0
            seconds = max(seconds - self.decode_step.value, 0.0)
        self.prompt_token.add(seconds / prompt_tokens)

    def _learn_decode_step(self, seconds: float) -> None:
        if not self._decode_only_steps:
            self._previous_decode_step = self.decode_step.value
        self.decode_step.add(seconds)
        self._decode_only_steps += 1
        if self._decode_only_steps != _REFRESH_STEPS:
            return
        if self._mixed_steps >= self._stale_after:
            right = abs(self.decode_step.value - self._previous_decode_step) * 8 < self._previous_decode_step
            self._stale_after = min(2 * self._stale_after, _MAX_STALE_STEPS) if right else _STALE_STEPS
        self._mixed_steps = 0
