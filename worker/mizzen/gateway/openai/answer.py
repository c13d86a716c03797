"""An answer as it grows: text, token ids, how it ends, and its usage."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.core.request import FinishReason
from mizzen.gateway.openai.bodies import PromptTokensDetails, Usage
from mizzen.gateway.text.stream import TextStream
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.wire.messages import Finish


@dataclass(frozen=True, slots=True)
class Piece:
    """What a delivery of tokens adds to an answer."""

    text: str
    ids: list[int]
    reason: str | None
    """OpenAI's finish_reason, with the last piece."""


class Answer:
    """The text of one request's tokens."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], prompt_tokens: int) -> None:
        self.tokens = 0
        self._stream = TextStream(tokenizer, stop)
        self._prompt_tokens = prompt_tokens

    def add(self, tokens: list[int], finish: Finish | None) -> Piece:
        """Take the next tokens, and the end with the last of them.

        A token that ended the answer (`Finish.stop_token`) is among the ids and not in the text.
        """
        visible = tokens
        if finish is not None and finish.stop_token is not None and tokens[-1:] == [finish.stop_token]:
            visible = tokens[:-1]
        text, used = self._stream.add(visible)
        if self._stream.stopped:
            self.tokens += used
            return Piece(text, tokens[:used], "stop")
        self.tokens += len(tokens)
        if finish is None:
            return Piece(text, tokens, None)
        text += self._stream.flush()
        stopped = self._stream.stopped or finish.reason == FinishReason.STOP
        return Piece(text, tokens, "stop" if stopped else "length")

    def usage(self, finish: Finish | None) -> Usage:
        """Return the counts of tokens."""
        cached = finish.cached_tokens if finish is not None else 0
        total = self._prompt_tokens + self.tokens
        return Usage(self._prompt_tokens, self.tokens, total, PromptTokensDetails(cached))
