"""How many prompt tokens fit into a step while streams run, learned from how long steps take."""

from __future__ import annotations

import math

from mizzen.core.config import SchedulerConfig

_SHARE = 0.5
"""Weight of the newest step in an estimate."""
_LEAST_TOKENS = 16
"""Prompts get at least so many tokens (or a page) a step, however slow steps are."""
_LEAST_SHARE = 0.25
"""Prompts get at least this share of a decode step's time on top of it."""
_SURE_TOKENS = 256
"""Estimates are trusted up to so many tokens, or half as many again as the newest step beside streams ran."""
_SCANT_TOKENS = 64
"""Where prompts get no more a step, it is worth a few steps to know again how long decodes alone take."""
_CLEAN_STEPS = 4
"""So many steps without prompts in a row tell that."""
_DOUBT_STEPS = 32
"""It is doubted after so many steps with prompts in a row, twice as many each time that it was right."""
_MOST_DOUBT_STEPS = 256


class Estimate:
    """An exponentially weighted mean of medians of three: one outlier has no weight, a change has at once."""

    __slots__ = ("_high", "_last", "_low", "value")

    def __init__(self) -> None:
        self.value = 0.0
        """0 as long as nothing is known."""
        self._low = self._high = self._last = 0.0
        """The two samples before, in order of size; and the newer of them."""

    def add(self, sample: float) -> None:
        """Take a sample."""
        low, high, last = self._low, self._high, self._last
        middle = low if sample < low else high if sample > high else sample
        self._low, self._high = (last, sample) if last < sample else (sample, last)
        self._last = sample
        self.value = self.value + (middle - self.value) * _SHARE if self.value else sample


class Pace:
    """Bounds a step's prompt tokens so that the gap between two tokens of a stream stays near a limit.

    A step is taken to last the time of a decode step plus a time for each prompt token. Chunks that cost
    more the smaller they are settle where the whole step takes the limit. As long as every step runs prompts,
    nothing tells how decodes alone change: where that may keep prompts or streams from what is theirs, a few
    steps run none. Deterministic: all it knows of time is what it is told.
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
        """Prompt tokens of the newest complete step that ran some beside decodes."""
        self._landed = 0.0
        """When the newest complete step was."""
        self._mixed = 0
        """Steps with prompts beside decodes since it was known how long decodes alone take."""
        self._clean = 0
        """Steps without prompts in a row, the newest complete ones."""
        self._believed = 0.0
        """What was taken for the time of decodes alone before these."""
        self._doubt = _DOUBT_STEPS
        """So many steps with prompts raise doubts."""
        self.decode_step = Estimate()
        """Seconds of a step without prompts."""
        self.prompt_token = Estimate()
        """Seconds that a prompt token adds to a step."""

    def budget(self, decodes: bool) -> int:
        """Return how many prompt tokens a step may run; `decodes` tells whether it decodes, too.

        None at all where it is to be seen how long decodes alone take.
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

    def landed(self, launched: float, now: float, prompt_tokens: int, decodes: bool) -> None:
        """Learn from a step that is complete.

        Args:
            launched: when it was launched; it began then, or when the step before it was complete.
            now: when it was complete.
            prompt_tokens: how many it ran.
            decodes: whether it decoded, too.
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
