# SPDX-License-Identifier: Apache-2.0
"""An engine as discovery reports it, and the mean size of the gateway's requests."""

from __future__ import annotations

from dataclasses import dataclass

FOREIGN_REQUEST_TOKENS = 512.0
"""Assumed mean size of requests in tokens, until this gateway has sent requests itself."""


MEAN_WEIGHT = 0.02
"""Weight of the newest request in the moving mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredEngine:
    """Engine as discovery reports it."""

    name: str
    uid: str
    endpoint: str
    revision: str = ""
    terminating: bool = False
    """True if the engine is being deleted: it finishes its requests and gets no new ones."""
    awaiting_verification: bool = False
    """True until the operator has verified the engine; until then, the engine gets only golden prompts."""


class MeanRequestSize:
    """Moving mean of the number of tokens per request of this gateway.

    Requests of other gateways are assumed to have this size when an engine's load is estimated.
    """

    def __init__(self) -> None:
        self.tokens = FOREIGN_REQUEST_TOKENS

    def add_request(self, tokens: float) -> None:
        """Add a request of `tokens` tokens to the mean."""
        self.tokens += MEAN_WEIGHT * (tokens - self.tokens)
