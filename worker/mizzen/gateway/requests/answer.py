"""One sequence's answer as it grows: from tokens to content, reasoning, calls and log probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mizzen.core.request import FinishReason, Int32
from mizzen.gateway.openai.logprobs import ScoredToken, scored
from mizzen.gateway.requests.generation_request import Wish
from mizzen.gateway.requests.output import OutputDelta, OutputParser, PlainOutput
from mizzen.gateway.text.model import TextModel
from mizzen.wire.client.stream import TokenLogprobs
from mizzen.wire.messages import Finish


class Piece(msgspec.Struct, frozen=True):
    """What a delivery of tokens adds to an answer."""

    delta: OutputDelta
    ids: list[int]
    reason: str | None = None
    """OpenAI's finish_reason, with the last piece."""
    scored: Sequence[ScoredToken] = ()
    """The same tokens with log probabilities, where asked for."""


class Answer:
    """The answer to one sequence of a request."""

    def __init__(self, wish: Wish, text: TextModel, prompt: Int32, start: int = 0) -> None:
        """Begin an answer whose text goes on from character `start` (behind a prompt that it echoes)."""
        self.tokens = 0
        """Output tokens so far, those behind a stop string not counted."""
        self.logprob = 0.0
        """Sum of the tokens' log probabilities, where they are asked for."""
        stop = wish.sampling.stop
        self._parser: OutputParser = (
            PlainOutput(stop) if wish.form is None else wish.form.parser(text, prompt, stop)
        )
        self._may_stop = bool(stop)
        self._prompt_only = wish.prompt_only
        self._detokenizer = text.tokenizer.detokenizer(wish.skip_special_tokens, self._parser.shown)
        self._tokenizer = text.tokenizer
        self._offset = start
        self._offsets = text.tokenizer.detokenizer(wish.skip_special_tokens) if wish.logprobs else None

    def add(self, tokens: list[int], finish: Finish | None, logprobs: list[TokenLogprobs]) -> Piece:
        """Take the next tokens with their log probabilities, and the end with the last of them.

        A token that ended the answer (`Finish.stop_token`) is among the ids and not in the text.
        """
        if self._prompt_only:
            return Piece(OutputDelta(), [], "length")
        visible = tokens
        if finish is not None and finish.stop_token is not None and tokens[-1:] == [finish.stop_token]:
            visible = tokens[:-1]
        delta, used = self._read(visible)
        if self._parser.stopped:
            tokens = tokens[:used]
        self.tokens += len(tokens)
        reason = None
        if finish is not None or self._parser.stopped:
            rest = "" if self._parser.stopped else self._detokenizer.flush()
            delta = joined(delta, self._parser.end(rest))
            reason = self._reason(finish)
        if self._offsets is None:
            return Piece(delta, tokens, reason)
        return Piece(delta, tokens, reason, [self._scored(entry) for entry in logprobs[: len(tokens)]])

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens were reasoning."""
        return self._parser.reasoning_tokens

    def _read(self, tokens: list[int]) -> tuple[OutputDelta, int]:
        """Return what tokens say, and how many of them lie before the end that a stop string makes."""
        parser, add = self._parser, self._detokenizer.add
        delta, used = OutputDelta(), 0
        while used < len(tokens) and (self._may_stop or parser.counts_tokens):
            delta, used = joined(delta, parser.feed(add(tokens[used : used + 1]))), used + 1
            if parser.stopped:
                return delta, used
        if used == len(tokens):
            return delta, used
        return joined(delta, parser.feed(add(tokens[used:]))), len(tokens)

    def _reason(self, finish: Finish | None) -> str:
        """Return OpenAI's finish_reason of an answer that has ended: by the engine, or by a stop string."""
        if self._parser.stopped or (finish is not None and finish.reason == FinishReason.STOP):
            return self._parser.finish_reason or "stop"
        return "length"

    def _scored(self, entry: TokenLogprobs) -> ScoredToken:
        found = scored(self._tokenizer, entry, self._offset)
        self.logprob += entry.logprob
        if self._offsets is not None:
            self._offset += len(self._offsets.add((entry.token,)))
        return found


def joined(first: OutputDelta, second: OutputDelta) -> OutputDelta:
    """Return two deltas as one."""
    if not second:
        return first
    if not first:
        return second
    return OutputDelta(
        first.content + second.content,
        first.reasoning + second.reasoning,
        first.tool_calls + second.tool_calls,
    )


def whole(pieces: list[Piece]) -> Piece:
    """Return an answer's pieces as one, its calls' arguments in pieces still."""
    calls = [call for piece in pieces for call in piece.delta.tool_calls]
    return Piece(
        OutputDelta(
            "".join([piece.delta.content for piece in pieces]),
            "".join([piece.delta.reasoning for piece in pieces]),
            tuple(calls),
        ),
        [token for piece in pieces for token in piece.ids],
        pieces[-1].reason if pieces else None,
        [token for piece in pieces for token in piece.scored],
    )
