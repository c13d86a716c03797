"""One sequence's answer as it grows: from tokens to content, reasoning, calls and log probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mizzen.core.request import FinishReason, Int32
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.output import OutputDelta, OutputParser, PlainOutput
from mizzen.gateway.requests.token_logprobs import ScoredToken, decode_logprobs
from mizzen.gateway.text.model import TextModel
from mizzen.wire.client.stream import TokenLogprobs
from mizzen.wire.messages import Finish


class AnswerPiece(msgspec.Struct, frozen=True):
    """What a delivery of tokens adds to an answer."""

    delta: OutputDelta
    token_ids: list[int]
    finish_reason: str | None = None
    """OpenAI's finish_reason, with the last piece."""
    logprobs: Sequence[ScoredToken] = ()
    """The same tokens with log probabilities, where asked for."""


class AnswerBuilder:
    """The answer to one sequence of a request."""

    def __init__(self, generation: GenerationRequest, text: TextModel, prompt: Int32, start: int = 0) -> None:
        """Begin an answer whose text goes on from character `start` (behind a prompt that it echoes)."""
        self.output_tokens = 0
        """Output tokens so far, those behind a stop string not counted."""
        self.total_logprob = 0.0
        """Sum of the tokens' log probabilities, where they are asked for."""
        stop = generation.sampling.stop
        self._parser: OutputParser = (
            PlainOutput(stop)
            if generation.output_form is None
            else generation.output_form.parser(text, prompt, stop)
        )
        self._may_stop = bool(stop)
        self._prompt_only = generation.prompt_only
        self._detokenizer = text.tokenizer.detokenizer(generation.skip_special_tokens, self._parser.shown)
        self._tokenizer = text.tokenizer
        self._offset = start
        self._offsets = (
            text.tokenizer.detokenizer(generation.skip_special_tokens) if generation.logprobs else None
        )

    def add(self, tokens: list[int], finish: Finish | None, logprobs: list[TokenLogprobs]) -> AnswerPiece:
        """Take the next tokens with their log probabilities, and the end with the last of them.

        A token that ended the answer (`Finish.stop_token`) is among the ids and not in the text.
        """
        if self._prompt_only:
            return AnswerPiece(OutputDelta(), [], "length")
        visible = tokens
        if finish is not None and finish.stop_token is not None and tokens[-1:] == [finish.stop_token]:
            visible = tokens[:-1]
        delta, used = self._parse(visible)
        if self._parser.stopped:
            tokens = tokens[:used]
        self.output_tokens += len(tokens)
        reason = None
        if finish is not None or self._parser.stopped:
            rest = "" if self._parser.stopped else self._detokenizer.flush()
            delta = join_deltas(delta, self._parser.end(rest))
            reason = self._finish_reason(finish)
        if self._offsets is None:
            return AnswerPiece(delta, tokens, reason)
        return AnswerPiece(
            delta, tokens, reason, [self._decode_logprobs(entry) for entry in logprobs[: len(tokens)]]
        )

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens were reasoning."""
        return self._parser.reasoning_tokens

    def _parse(self, tokens: list[int]) -> tuple[OutputDelta, int]:
        """Return what tokens say, and how many of them lie before the end that a stop string makes."""
        parser, add = self._parser, self._detokenizer.add
        delta, used = OutputDelta(), 0
        while used < len(tokens) and (self._may_stop or parser.counts_tokens):
            delta, used = join_deltas(delta, parser.feed(add(tokens[used : used + 1]))), used + 1
            if parser.stopped:
                return delta, used
        if used == len(tokens):
            return delta, used
        return join_deltas(delta, parser.feed(add(tokens[used:]))), len(tokens)

    def _finish_reason(self, finish: Finish | None) -> str:
        """Return OpenAI's finish_reason of an answer that has ended: by the engine, or by a stop string."""
        if self._parser.stopped or (finish is not None and finish.reason == FinishReason.STOP):
            return self._parser.finish_reason or "stop"
        return "length"

    def _decode_logprobs(self, entry: TokenLogprobs) -> ScoredToken:
        found = decode_logprobs(self._tokenizer, entry, self._offset)
        self.total_logprob += entry.logprob
        if self._offsets is not None:
            self._offset += len(self._offsets.add((entry.token,)))
        return found


def join_deltas(first: OutputDelta, second: OutputDelta) -> OutputDelta:
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


def join_pieces(pieces: list[AnswerPiece]) -> AnswerPiece:
    """Return an answer's pieces as one, its calls' arguments in pieces still."""
    calls = [call for piece in pieces for call in piece.delta.tool_calls]
    return AnswerPiece(
        OutputDelta(
            "".join([piece.delta.content for piece in pieces]),
            "".join([piece.delta.reasoning for piece in pieces]),
            tuple(calls),
        ),
        [token for piece in pieces for token in piece.token_ids],
        pieces[-1].finish_reason if pieces else None,
        [token for piece in pieces for token in piece.logprobs],
    )
