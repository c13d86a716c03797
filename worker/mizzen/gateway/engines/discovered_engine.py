"""MODULE."""

from __future__ import annotations

from dataclasses import dataclass

FOREIGN_REQUEST_TOKENS = 512.0
"""Counted for a request of another gateway until this one knows how large requests are."""


MEAN_WEIGHT = 0.02
"""Weight of the newest request in the mean size of requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredEngine:
    """An engine as discovery reports it."""

    name: str
    uid: str
    endpoint: str
    revision: str = ""
    terminating: bool = False
    """It ends what it has, and gets nothing new."""
    awaiting_verification: bool = False
    """It has not been verified yet: it gets golden prompts alone."""


class MeanRequestSize:
    """How many tokens a request of this gateway has in work on average; one of another counts as much."""

    def __init__(self) -> None:
        self.tokens = FOREIGN_REQUEST_TOKENS

    def add_request(self, tokens: float) -> None:
        """Note a request."""
        self.tokens += MEAN_WEIGHT * (tokens - self.tokens)
