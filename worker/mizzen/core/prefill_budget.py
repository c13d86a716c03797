"""The adaptive prefill token budget: how many prompt tokens a step may compute while requests decode."""

from __future__ import annotations

import math

from mizzen.core.config import SchedulerConfig

_SHARE = 0.5
"""Weight of the newest step in an estimate."""
_LEAST_TOKENS = 16
"""Minimum budget in tokens (or one page, if larger), however slow steps are."""
_LEAST_SHARE = 0.25
"""Minimum time for prefill, as a share of the duration of a decode-only step."""
_SURE_TOKENS = 256
"""Largest budget for which estimates are trusted at once; beyond it, at most 1.5 times the newest mixed
step."""
_SCANT_TOKENS = 64
"""Largest budget at which decode-only steps are inserted to measure the duration of decodes again."""
_CLEAN_STEPS = 4
"""Number of consecutive decode-only steps that refresh the estimate of their duration."""
_DOUBT_STEPS = 32
"""Number of mixed steps after which the decode-only estimate is stale; doubled each time it proves right."""
_MOST_DOUBT_STEPS = 256
"""Upper bound of that number."""


class Estimate:
    """An exponentially weighted mean over medians of three samples: robust to one outlier, quick to
    follow."""

    __slots__ = ("_high", "_last", "_low", "value")

    def __init__(self) -> None:
        self.value = 0.0
        """The estimate; 0 before the first sample."""
        self._low = self._high = self._last = 0.0
        """The smaller and the larger of the previous two samples, and the newer of them."""

    def add(self, sample: float) -> None:
        """Add a sample."""
        low, high, last = self._low, self._high, self._last
        middle = low if sample < low else high if sample > high else sample
        self._low, self._high = (last, sample) if last < sample else (sample, last)
        self._last = sample
        self.value = self.value + (middle - self.value) * _SHARE if self.value else sample


class PrefillBudget:
    """Bounds the prompt tokens of a step so that the time between tokens of a stream stays near a limit.

    The model: a step lasts as long as a decode-only step plus a constant time per prompt token. While every
    step contains prefill, the duration of decode-only steps cannot be observed. If a stale estimate could
    starve prefill or decodes, a few decode-only steps are inserted. Deterministic: time enters only through
    `record_step`.
    """

    __slots__ = (
        "_believed", "_clean", "_doubt", "_landed", "_least", "_limit", "_mixed", "_most", "_page", "_tried",
        "decode_step", "prompt_token",
    )  # fmt: skip

    def __init__(self, config: SchedulerConfig) -> None:
        limit = config.max_step_milliseconds
        self._limit = None if limit in (None, math.inf) else limit / 1e3
        self._most = config.prefill_chunk_tokens
        self._page = config.page_size
        self._least = min(max(self._page, _LEAST_TOKENS), self._most)
        self._tried = 0
        """Number of prompt tokens of the newest complete mixed step."""
        self._landed = 0.0
        """Time at which the newest complete step was complete."""
        self._mixed = 0
        """Number of mixed steps since the decode-only estimate was refreshed."""
        self._clean = 0
        """Number of consecutive decode-only steps, up to the newest complete one."""
        self._believed = 0.0
        """The decode-only estimate before these steps."""
        self._doubt = _DOUBT_STEPS
        """Number of mixed steps after which the decode-only estimate is stale."""
        self.decode_step = Estimate()
        """Estimated seconds of a decode-only step."""
        self.prompt_token = Estimate()
        """Estimated seconds that one prompt token adds to a step."""

    def tokens(self, decodes: bool) -> int:
        """Return the maximum number of prompt tokens of the next step.

        Returns 0 to insert a decode-only step.

        Args:
            decodes: whether the step also decodes; if not, the budget is `prefill_chunk_tokens`.
        """
        if self._limit is None or not decodes:
            return self._most
        left, share = self._limit - self.decode_step.value, self.decode_step.value * _LEAST_SHARE
        room = max(left, share)
        tokens, cost = max(_SURE_TOKENS, self._tried + self._tried // 2, self._least), self.prompt_token.value
        if cost * tokens > room:
            tokens = max(int(room / cost), self._least)
        if self._mixed >= self._doubt and (tokens <= _SCANT_TOKENS or left < share):
            return 0
        if tokens >= self._most:
            return self._most
        return tokens - tokens % self._page

    def record_step(self, launched: float, now: float, prompt_tokens: int, decodes: bool) -> None:
        """Update the estimates with a complete step.

        Args:
            launched: launch time in seconds; the step began then, or when the previous one was complete.
            now: time of completion in seconds.
            prompt_tokens: number of prompt tokens of the step.
            decodes: whether the step also decoded.
        """
        seconds = now - (launched if launched > self._landed else self._landed)
        self._landed = now
        if self._limit is None or seconds < 0:
            return
        if not prompt_tokens:
            self._learn_decode_step(seconds)
            return
        if decodes:
            self._tried = prompt_tokens
            self._mixed += 1
            self._clean = 0
            seconds = max(seconds - self.decode_step.value, 0.0)
        self.prompt_token.add(seconds / prompt_tokens)

    def _learn_decode_step(self, seconds: float) -> None:
        if not self._clean:
            self._believed = self.decode_step.value
        self.decode_step.add(seconds)
        self._clean += 1
        if self._clean != _CLEAN_STEPS:
            return
        if self._mixed >= self._doubt:
            right = abs(self.decode_step.value - self._believed) * 8 < self._believed
            self._doubt = min(2 * self._doubt, _MOST_DOUBT_STEPS) if right else _DOUBT_STEPS
        self._mixed = 0
