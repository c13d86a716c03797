"""What is asked when: sessions of requests, drawn from distributions."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Prompt = str | list[int]

TEXT = """
    a again all and are as at back before big boat by day down far find first for from good great hand he
    help high home house how if in it keep kind last left life light line little long look made make man
    many me mean men more most move much my name near new next night no not now number of off old on one
    only or other our out over own part people place plan point read right run same say sea see set she
    ship show side small so some still such take tell than that the their them then there they thing this
    time to too tree turn two under until up use very was water way we well went were what when where
    which while white who why will wind with word work world would write year you young
"""
WORDS = TEXT.split()
"""Words that most vocabularies have one token for."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request."""

    after: float
    """Seconds from the start of the run; of a later turn, from the end of the answer before it."""
    prompt: Prompt
    """What is new in it."""
    output: int
    """Tokens to generate."""


@dataclass(frozen=True, slots=True)
class Session:
    """Requests of one client, each sent behind the answer to the one before. Most have one alone."""

    asks: tuple[Ask, ...]


class Lengths:
    """A distribution of lengths, at least 1 each.

    `100` or `D(100)` is always 100; `U(100,1024)` uniform, bounds included; `N(480,240)` normal by mean and
    standard deviation; `L(500,1.2)` lognormal by median and the logarithm's standard deviation.
    """

    FORM = re.compile(r"^(?:([DUNL])\(([\d.]+)(?:,([\d.]+))?\)|(\d+))$")

    def __init__(self, text: str) -> None:
        """Read a distribution.

        Raises:
            ValueError: it has none of these forms.
        """
        found = self.FORM.match(text.replace(" ", ""))
        if found is None or (found[1] in ("U", "N", "L")) != (found[3] is not None):
            raise ValueError(f"{text!r} is none of 100, D(100), U(100,1024), N(480,240), L(500,1.2)")
        self.text = text
        self.kind = found[1] or "D"
        self.first = float(found[2] or found[4])
        self.second = float(found[3] or 0)
        if self.kind == "U" and self.second < self.first:
            raise ValueError(f"{text!r} ends before it begins")

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        """Draw so many lengths."""
        match self.kind:
            case "D":
                drawn = np.full(count, self.first)
            case "U":
                drawn = random.integers(int(self.first), int(self.second) + 1, count)
            case "N":
                drawn = random.normal(self.first, self.second, count)
            case _:
                drawn = self.first * np.exp(random.normal(0, self.second, count))
        return np.maximum(np.rint(drawn), 1).astype(int).tolist()


def arrivals(random: np.random.Generator, count: int, rate: float, burstiness: float) -> NDArray[np.float64]:
    """Return the times of so many arrivals, `rate` a second on average.

    Gaps are gamma distributed, `burstiness` times as varied as those of a Poisson process (that is 1): their
    coefficient of variation. 0 makes them equal.
    """
    if burstiness == 0:
        gaps = np.full(count, 1 / rate)
    else:
        shape = burstiness**-2
        gaps = random.gamma(shape, 1 / (rate * shape), count)
    return np.cumsum(gaps) - gaps[0]


class Texts:
    """Makes prompts of so many tokens: ids, or words of about one token each."""

    def __init__(self, random: np.random.Generator, vocabulary: int | None) -> None:
        self.random = random
        self.vocabulary = vocabulary
        """Ids are below; None makes words."""

    def make(self, tokens: int) -> Prompt:
        """Make a new prompt."""
        if self.vocabulary is not None:
            return self.random.integers(0, self.vocabulary, tokens).tolist()
        return " ".join(WORDS[i] for i in self.random.integers(0, len(WORDS), tokens))

    def joined(self, parts: list[Prompt]) -> Prompt:
        """Put parts together."""
        if self.vocabulary is None:
            return " ".join(str(part) for part in parts)
        return [token for part in parts for token in part if isinstance(token, int)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Distributions to draw from."""

    requests: int
    rate: float
    """Sessions that begin a second."""
    burstiness: float
    inputs: Lengths
    outputs: Lengths
    shared: int
    """Tokens that all prompts of a group begin with."""
    groups: int
    turns: int
    think: float
    """Mean seconds between an answer and the next turn, exponentially distributed."""


def generate(workload: Workload, texts: Texts) -> list[Session]:
    """Draw sessions; the same random generator gives the same ones."""
    random, count = texts.random, workload.requests
    sessions = -(-count // workload.turns)
    prefixes = [texts.make(workload.shared) for _ in range(workload.groups)] if workload.shared else []
    begins = arrivals(random, sessions, workload.rate, workload.burstiness)
    inputs, outputs = workload.inputs.draw(random, count), workload.outputs.draw(random, count)
    made: list[Session] = []
    for index, begin in enumerate(begins.tolist()):
        asks: list[Ask] = []
        first = index * workload.turns
        for number in range(first, min(first + workload.turns, count)):
            prompt, after = texts.make(inputs[number]), begin
            if asks:
                after = float(random.exponential(workload.think)) if workload.think else 0.0
            elif prefixes:
                prompt = texts.joined([prefixes[int(random.integers(len(prefixes)))], prompt])
            asks.append(Ask(after, prompt, outputs[number]))
        made.append(Session(tuple(asks)))
    return made


def rate_of(sessions: list[Session]) -> float:
    """Return the sessions that begin a second."""
    last = max(session.asks[0].after for session in sessions)
    return (len(sessions) - 1) / last if last > 0 else math.inf
