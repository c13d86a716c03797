"""What discovery and the gateway know about an engine's identity, and the mean size of its requests."""

from __future__ import annotations

from dataclasses import dataclass

FOREIGN_REQUEST_TOKENS = 512.0
"""Assumed size of another gateway's request, until this gateway has a mean of its own."""


MEAN_WEIGHT = 0.02
"""Weight of the newest request in the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredEngine:
    """Engine as reported by discovery."""

    name: str
    uid: str
    endpoint: str
    revision: str = ""
    terminating: bool = False
    """True if it finishes its requests and gets no new ones."""
    awaiting_verification: bool = False
    """True if the operator has yet to verify it; until then it gets golden prompts only."""


class MeanRequestSize:
    """Mean tokens of this gateway's requests, used to estimate those of other gateways."""

    def __init__(self) -> None:
        self.tokens = FOREIGN_REQUEST_TOKENS

    def add_request(self, tokens: float) -> None:
        """Add a request of `tokens` to the mean."""
        self.tokens += MEAN_WEIGHT * (tokens - self.tokens)
