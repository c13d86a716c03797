# SPDX-License-Identifier: Apache-2.0
"""Generates random sessions of requests, and the times at which they are due, from distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from common_parts.lengths import Lengths
from numpy.typing import NDArray

Prompt = str | list[int]

TEXT = """
    a again all and are as at back before big boat by day down far find first for from good great hand he
    help high home house how if in it keep kind last left life light line little long look parser make man
    many me mean men more most move much my name near new next night no not now number of off old on one
    only or other our out over own part people place plan point read right run same say sea see set she
    ship show side small so some still such take tell than that the their them then there they thing this
    time to too tree turn two under until up use very was water way we well went were what when where
    which while white who why will wind with word work world would write year you young
"""
WORDS = TEXT.split()
"""Words that are one token in most vocabularies."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request with the time at which it is due."""

    after: float
    """Time at which the request is due, in seconds.

    For the first turn of a session, it counts from the start of the run; for later turns, it counts from the
    end of the previous answer.
    """
    prompt: Prompt
    """Text or token ids that this turn adds to the session."""
    output: int
    """Number of tokens to generate."""


@dataclass(frozen=True, slots=True)
class Session:
    """Requests (turns) of one user; each is sent after the answer to the previous request."""

    requests: tuple[TimedRequest, ...]


def arrivals(random: np.random.Generator, count: int, rate: float, burstiness: float) -> NDArray[np.float64]:
    """Return the times, in seconds, of `count` random arrivals; the mean rate is `rate` per second.

    Gaps have a gamma distribution with the coefficient of variation `burstiness`: 1 gives a Poisson process,
    0 gives equal gaps.
    """
    if burstiness == 0:
        gaps = np.full(count, 1 / rate)
    else:
        shape = burstiness**-2
        gaps = random.gamma(shape, 1 / (rate * shape), count)
    return np.cumsum(gaps) - gaps[0]


class Texts:
    """Generator of random prompts, which are token ids or words of about one token each."""

    def __init__(self, random: np.random.Generator, vocabulary: int | None) -> None:
        self.random = random
        self.vocabulary = vocabulary
        """Upper bound of token ids, exclusive; None to generate words."""

    def generate(self, tokens: int) -> Prompt:
        """Return a random prompt of `tokens` tokens."""
        if self.vocabulary is not None:
            return self.random.integers(0, self.vocabulary, tokens).tolist()
        return " ".join(WORDS[i] for i in self.random.integers(0, len(WORDS), tokens))

    def join(self, parts: list[Prompt]) -> Prompt:
        """Return the concatenation of prompts."""
        if self.vocabulary is None:
            return " ".join(str(part) for part in parts)
        return [token for part in parts for token in part if isinstance(token, int)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Distributions from which the sessions of a run are generated."""

    requests: int
    rate: float
    """Mean number of sessions started per second."""
    burstiness: float
    inputs: Lengths
    outputs: Lengths
    shared: int
    """Number of tokens of the prefix that all prompts of a group share."""
    groups: int
    turns: int
    think: float
    """Mean seconds between an answer and the next turn; the times are exponentially distributed."""


def generate(workload: Workload, texts: Texts) -> list[Session]:
    """Generate the sessions of a run; equal states of `texts.random` give equal sessions."""
    random, count = texts.random, workload.requests
    sessions = -(-count // workload.turns)
    prefixes = [texts.generate(workload.shared) for _ in range(workload.groups)] if workload.shared else []
    begins = arrivals(random, sessions, workload.rate, workload.burstiness)
    inputs, outputs = workload.inputs.draw(random, count), workload.outputs.draw(random, count)
    result: list[Session] = []
    for index, begin in enumerate(begins.tolist()):
        requests: list[TimedRequest] = []
        first = index * workload.turns
        for number in range(first, min(first + workload.turns, count)):
            prompt, after = texts.generate(inputs[number]), begin
            if requests:
                after = float(random.exponential(workload.think)) if workload.think else 0.0
            elif prefixes:
                prompt = texts.join([prefixes[int(random.integers(len(prefixes)))], prompt])
            requests.append(TimedRequest(after, prompt, outputs[number]))
        result.append(Session(tuple(requests)))
    return result


def rate_of(sessions: list[Session]) -> float:
    """Return the mean number of sessions that start per second."""
    last = max(session.requests[0].after for session in sessions)
    return (len(sessions) - 1) / last if last > 0 else math.inf
