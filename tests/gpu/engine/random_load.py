# SPDX-License-Identifier: Apache-2.0
"""A random load on an engine, with all kinds of requests and with aborts."""

from __future__ import annotations

import time

import numpy as np

from mizzen import SamplingParams
from mizzen.core.request import FinishReason, Request
from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.engine.engine import Engine

KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.7, "frequency_penalty": 0.5, "logprobs": 5},
    {"temperature": 0.9, "repetition_penalty": 1.1, "logit_bias": ((5, 2.0),)},
)
REPORTED = {"temperature": 0.8, "prompt_logprobs": 2, "logprobs": 1}
CONSTRAINED = {"temperature": 1.0, "grammar": Grammar(GrammarKind.REGEX, r"([a-f]{2,4}\d{3}-)+")}
"""Sampling fields with a grammar that allows an end after any `-`; some outputs stop before `max_tokens`."""
ALL = (*KINDS, REPORTED, CONSTRAINED)
LONGEST = 1500
"""Maximum length of a prompt, in tokens."""
AT_ONCE = 120
ABORTS = 0.1
"""Probability that the load aborts one request before a step."""


def request(rid: int, draw: np.random.Generator) -> Request:
    """Return a random request; requests with odd ids share a prefix."""
    prompt = draw.integers(3, 10_000, int(draw.integers(1, LONGEST)))
    if rid % 2:
        prompt[: LONGEST // 4] = np.arange(LONGEST // 4)[: len(prompt)]
    sampling = SamplingParams(max_tokens=int(draw.integers(1, 200)), ignore_eos=True, **ALL[rid % len(ALL)])
    return Request(
        rid=rid,
        prompt=prompt.astype(np.int32),
        sampling=sampling,
        seed=rid,
        arrival=time.monotonic(),
        priority=int(draw.integers(0, 3)),
    )


class RandomLoad:
    """Keeps an engine full for some seconds, then lets the running requests end."""

    def __init__(self, engine: Engine, seconds: float) -> None:
        self.submitted = self.ended = self.aborted = self.errors = 0
        """Numbers of requests so far; `ended` includes aborted requests and those with errors."""
        self._engine = engine
        self._seconds = seconds
        self._draw = np.random.default_rng(1)
        self._live: set[int] = set()
        self._begin = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self._begin

    def step(self) -> bool:
        """Submit and abort requests, and run a step; return whether more steps are needed."""
        engine, draw, live = self._engine, self._draw, self._live
        while self.elapsed < self._seconds and len(live) < AT_ONCE:
            self.submitted += 1
            engine.submit(request(self.submitted, draw))
            live.add(self.submitted)
        if live and draw.random() < ABORTS:
            engine.abort(int(draw.choice(sorted(live))))
        output = engine.step(time.monotonic())
        engine.drain_cache_events()
        finished = [*(output.finished if output else ()), *engine.drain_finished()]
        live -= {end.rid for end in finished}
        self.ended += len(finished)
        self.aborted += sum(end.reason is FinishReason.ABORT for end in finished)
        self.errors += sum(end.reason is FinishReason.ERROR for end in finished)
        # The last request may end while a step is still in flight.
        return self.elapsed < self._seconds or bool(live) or engine.busy
