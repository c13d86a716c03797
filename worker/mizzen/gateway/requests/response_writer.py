# SPDX-License-Identifier: Apache-2.0
"""Interface between a generating exchange and the JSON shape of an API.

`GenerationExchange` calls it; chat completions, completions, the Responses
API and the Messages API implement it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mizzen.gateway.requests.answer import AnswerPiece
from mizzen.gateway.requests.sequence import EchoedPrompt
from mizzen.gateway.requests.usage import TokenUsage


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """A complete choice of a response; `piece` holds its whole answer."""

    index: int
    piece: AnswerPiece
    echo: EchoedPrompt | None
    prompt: list[int]


class ResponseWriter(Protocol):
    """Encoder of one response in the JSON shape of an API."""

    def start_choice(self, index: int, echo: EchoedPrompt | None, prompt_tokens: int) -> bytes:
        """Return the events that start a choice.

        `echo` is the prompt that the choice repeats, if any. `prompt_tokens` is the number of tokens of
        the prompt, with or without `echo`.
        """
        ...

    def write_piece(self, index: int, piece: AnswerPiece, usage: TokenUsage | None) -> bytes:
        """Return the events for a piece of a choice.

        The last piece of a choice has a finish reason. `usage` is the choice's usage so far; None unless
        events report it.
        """
        ...

    def write_usage(self, usage: TokenUsage) -> bytes:
        """Return the event that carries only the usage."""
        ...

    def end_stream(self) -> bytes:
        """Return the events that end a stream."""
        ...

    def full_response(self, choices: list[FinishedChoice], usage: TokenUsage) -> bytes:
        """Return the body of a response that is not streamed."""
        ...
