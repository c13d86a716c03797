# SPDX-License-Identifier: Apache-2.0
"""Build a sequence's answer as its tokens arrive: content, reasoning, tool calls and log probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mizzen.core.request import FinishReason, Int32
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.output import OutputDelta, OutputParser, PlainOutput, ToolCallDelta
from mizzen.gateway.requests.token_logprobs import ScoredToken, decode_logprobs
from mizzen.gateway.text.model import TextModel
from mizzen.wire.client.stream import TokenLogprobs
from mizzen.wire.messages import Finish


class AnswerPiece(msgspec.Struct, frozen=True):
    """Part of an answer: the output of the tokens that an engine delivered together."""

    delta: OutputDelta
    token_ids: list[int]
    finish_reason: str | None = None
    """OpenAI's finish_reason; None except in the last piece of an answer."""
    logprobs: Sequence[ScoredToken] = ()
    """Log probabilities of the tokens in `token_ids`, if requested."""
    stop_string: str | None = None
    """Stop string that ended the answer; None except in the last piece."""


class AnswerBuilder:
    """Builder of one sequence's answer, which detokenizes and parses its tokens."""

    def __init__(self, generation: GenerationRequest, text: TextModel, prompt: Int32, start: int = 0) -> None:
        """Begin an answer; `start` is the length in characters of the echoed prompt that precedes it."""
        self.output_tokens = 0
        """Number of output tokens so far; tokens after a stop string do not count."""
        self.total_logprob = 0.0
        """Sum of the log probabilities of the output tokens, if requested."""
        stop = generation.sampling.stop
        self._parser: OutputParser = (
            PlainOutput(stop)
            if generation.output_form is None
            else generation.output_form.parser(text, prompt, stop)
        )
        self._may_stop = bool(stop)
        self._prompt_only = generation.prompt_only
        self._detokenizer = text.tokenizer.detokenizer(
            generation.skip_special_tokens, self._parser.shown, self._parser.marks
        )
        self._tokenizer = text.tokenizer
        self._offset = start
        self._offsets = (
            text.tokenizer.detokenizer(generation.skip_special_tokens) if generation.logprobs else None
        )

    def add(self, tokens: list[int], finish: Finish | None, logprobs: list[TokenLogprobs]) -> AnswerPiece:
        """Add the next tokens, with their log probabilities if requested; return the piece that they add.

        `finish` is only set with the last tokens. The token that ended the answer (`Finish.stop_token`) is in
        the piece's token ids, but not in its text.
        """
        if self._prompt_only:
            return AnswerPiece(OutputDelta(), [], "length")
        visible = tokens
        if finish is not None and finish.stop_token is not None and tokens[-1:] == [finish.stop_token]:
            visible = tokens[:-1]
        delta, used_tokens = self._parse(visible)
        if self._parser.stopped:
            tokens = tokens[:used_tokens]
        self.output_tokens += len(tokens)
        reason = None
        if finish is not None or self._parser.stopped:
            rest = "" if self._parser.stopped else self._detokenizer.flush()
            cut_off = not self._parser.stopped and not ended_by_model(finish)
            delta = join_deltas(delta, self._parser.end(rest, cut_off=cut_off))
            reason = self._finish_reason(finish)
        stop_string = self._parser.stop_string
        if self._offsets is None:
            return AnswerPiece(delta, tokens, reason, stop_string=stop_string)
        scored = [self._decode_logprobs(entry) for entry in logprobs[: len(tokens)]]
        return AnswerPiece(delta, tokens, reason, scored, stop_string)

    @property
    def reasoning_tokens(self) -> int:
        """Number of output tokens that are reasoning."""
        return self._parser.reasoning_tokens

    def _parse(self, tokens: list[int]) -> tuple[OutputDelta, int]:
        """Parse tokens; return their output and the number of tokens used.

        Tokens after the end of a stop string are not used.
        """
        parser, add = self._parser, self._detokenizer.add
        delta, used_tokens = OutputDelta(), 0
        singly = self._may_stop or not parser.marks.keys().isdisjoint(tokens)
        while used_tokens < len(tokens) and (singly or parser.counts_tokens):
            delta, used_tokens = (
                join_deltas(delta, parser.feed(add(tokens[used_tokens : used_tokens + 1]))),
                used_tokens + 1,
            )
            if parser.stopped:
                return delta, used_tokens
        if used_tokens == len(tokens):
            return delta, used_tokens
        return join_deltas(delta, parser.feed(add(tokens[used_tokens:]))), len(tokens)

    def _finish_reason(self, finish: Finish | None) -> str:
        """Return OpenAI's finish_reason of an answer that the engine or a stop string has ended."""
        if self._parser.stopped or ended_by_model(finish):
            return self._parser.finish_reason or "stop"
        return "length"

    def _decode_logprobs(self, entry: TokenLogprobs) -> ScoredToken:
        token = decode_logprobs(self._tokenizer, entry, self._offset)
        self.total_logprob += entry.logprob
        if self._offsets is not None:
            self._offset += len(self._offsets.add((entry.token,)))
        return token


def ended_by_model(finish: Finish | None) -> bool:
    """Return whether an answer ended at an end token, a stop token, or the end of its grammar."""
    return finish is not None and finish.reason == FinishReason.STOP


def join_deltas(first: OutputDelta, second: OutputDelta) -> OutputDelta:
    """Join two consecutive deltas into one."""
    if not second:
        return first
    if not first:
        return second
    return OutputDelta(
        first.content + second.content,
        first.reasoning + second.reasoning,
        join_tool_calls(first.tool_calls + second.tool_calls),
    )


def join_pieces(pieces: list[AnswerPiece]) -> AnswerPiece:
    """Join consecutive pieces of an answer into one, with at most one delta for each tool call."""
    calls = [call for piece in pieces for call in piece.delta.tool_calls]
    return AnswerPiece(
        OutputDelta(
            "".join([piece.delta.content for piece in pieces]),
            "".join([piece.delta.reasoning for piece in pieces]),
            join_tool_calls(calls),
        ),
        [token for piece in pieces for token in piece.token_ids],
        pieces[-1].finish_reason if pieces else None,
        [token for piece in pieces for token in piece.logprobs],
        pieces[-1].stop_string if pieces else None,
    )


def join_tool_calls(parts: Sequence[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Join consecutive parts of tool calls; return one delta per index, in the order of the indices.

    A delta has an id and a name if one of its parts has them, that is, if the call begins in it.
    """
    if len(parts) <= 1:
        return tuple(parts)
    calls: dict[int, list[ToolCallDelta]] = {}
    for part in parts:
        calls.setdefault(part.index, []).append(part)
    return tuple(join_call_parts(calls[index]) for index in sorted(calls))


def join_call_parts(parts: list[ToolCallDelta]) -> ToolCallDelta:
    """Join consecutive parts of one tool call; `parts` must not be empty."""
    return ToolCallDelta(
        parts[0].index,
        next((part.id for part in parts if part.id is not None), None),
        next((part.name for part in parts if part.name is not None), None),
        "".join([part.arguments for part in parts]),
    )
