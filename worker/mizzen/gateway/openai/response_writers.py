"""Answers as JSON: the events of a stream, and whole responses, of both endpoints."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from mizzen.gateway.openai.logprobs import chat_logprobs, text_logprobs
from mizzen.gateway.openai.response_bodies import (
    AnsweredCall,
    AnsweredFunction,
    AnswerMessage,
    CalledFunctionDelta,
    ChatChoice,
    ChatLogprobs,
    ChatResponse,
    Chunk,
    ChunkChoice,
    CompletionResponse,
    Delta,
    TextChoice,
    TextLogprobs,
    ToolCallChunk,
    Usage,
    usage_body,
)
from mizzen.gateway.requests.answer import AnswerPiece
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.output import OutputDelta, ToolCallDelta
from mizzen.gateway.requests.sequence import EchoedPrompt
from mizzen.gateway.requests.usage import TokenUsage

DONE = b"data: [DONE]\n\n"
SLOT = "\u0000mizzen\u0000"
"""What a template has in place of a text; names of models cannot hold it."""
_encode = msgspec.json.Encoder().encode


def event(data: bytes) -> bytes:
    """Return a server-sent event."""
    return b"data: " + data + b"\n\n"


@dataclass(frozen=True, slots=True)
class Choice:
    """A whole choice."""

    index: int
    piece: AnswerPiece
    echo: EchoedPrompt | None
    prompt: list[int]


class Writer(Protocol):
    """Writes one response."""

    def first(self, index: int, echo: EchoedPrompt | None) -> bytes:
        """Return the events that a choice begins with."""
        ...

    def piece(self, index: int, piece: AnswerPiece, usage: TokenUsage | None) -> bytes:
        """Return the events for more of a choice, or for its end; `usage` is that of the choice so far."""
        ...

    def usage(self, usage: TokenUsage) -> bytes:
        """Return the event that holds the usage alone."""
        ...

    def end(self) -> bytes:
        """Return the events that a stream ends with."""
        ...

    def whole(self, choices: list[Choice], usage: TokenUsage) -> bytes:
        """Return the response of a request without stream."""
        ...


class Template:
    """An event whose text alone changes: it is encoded once, and the text put in."""

    __slots__ = ("_after", "_before")

    def __init__(self, encoded: bytes) -> None:
        """Take an event that holds the text SLOT."""
        self._before, self._after = encoded.split(_encode(SLOT))

    def fill(self, text: str) -> bytes:
        """Return the event with a text."""
        return self._before + _encode(text) + self._after


class _Writer:
    prefix = ""

    def __init__(self, generation: GenerationRequest) -> None:
        self._id = self.prefix + uuid.uuid4().hex
        self._created = int(time.time())
        self._generation = generation
        self._model = generation.model
        self._no_usage: UnsetType | None = None if generation.include_usage else UNSET
        self._plain = not (generation.logprobs or generation.return_token_ids or generation.continuous_usage)
        """Whether the events of a choice differ in their text alone, but for the last."""
        self._templates: dict[int, Template] = {}

    def end(self) -> bytes:
        """See `Writer`."""
        return DONE

    def _ids(self, ids: list[int]) -> list[int] | UnsetType:
        return ids if self._generation.return_token_ids else UNSET


class ChatWriter(_Writer):
    """Writes chat completions."""

    prefix = "chatcmpl-"

    def first(self, index: int, echo: EchoedPrompt | None) -> bytes:
        """See `Writer`."""
        return self._chunk(ChunkChoice(Delta(role="assistant", content=""), index=index), None)

    def piece(self, index: int, piece: AnswerPiece, usage: TokenUsage | None) -> bytes:
        """See `Writer`."""
        given = piece.delta
        if self._plain and piece.finish_reason is None and not given.reasoning and not given.tool_calls:
            return self._template(index).fill(given.content)
        logprobs, events = self._logprobs(piece), b""
        told = logprobs is not None or (self._generation.return_token_ids and piece.token_ids)
        if piece.delta or told:
            choice = ChunkChoice(delta(piece.delta), None, index, logprobs, self._ids(piece.token_ids))
            events = self._chunk(choice, usage)
        if piece.finish_reason is not None:
            events += self._chunk(ChunkChoice(Delta(), piece.finish_reason, index), usage)
        return events

    def usage(self, usage: TokenUsage) -> bytes:
        """See `Writer`."""
        return event(_encode(Chunk(self._id, self._created, self._model, [], usage=usage_body(usage))))

    def whole(self, choices: list[Choice], usage: TokenUsage) -> bytes:
        """See `Writer`."""
        written = [
            ChatChoice(
                message(choice.piece.delta),
                choice.piece.finish_reason or "stop",
                choice.index,
                self._logprobs(choice.piece),
                self._ids(choice.piece.token_ids),
            )
            for choice in choices
        ]
        response = ChatResponse(self._id, self._created, self._model, written, usage_body(usage))
        response.prompt_token_ids = self._ids(choices[0].prompt)
        return _encode(response)

    def _template(self, index: int) -> Template:
        found = self._templates.get(index)
        if found is None:
            event = self._chunk(ChunkChoice(Delta(content=SLOT), index=index), None)
            found = self._templates[index] = Template(event)
        return found

    def _logprobs(self, piece: AnswerPiece) -> ChatLogprobs | None:
        if not piece.logprobs or not self._generation.logprobs:
            return None
        return chat_logprobs(piece.logprobs, self._generation.tokens_as_ids)

    def _chunk(self, choice: ChunkChoice, usage: TokenUsage | None) -> bytes:
        told = self._no_usage if usage is None else usage_body(usage)
        return event(_encode(Chunk(self._id, self._created, self._model, [choice], usage=told)))


class CompletionWriter(_Writer):
    """Writes text completions."""

    prefix = "cmpl-"

    def first(self, index: int, echo: EchoedPrompt | None) -> bytes:
        """See `Writer`."""
        if echo is None:
            return b""
        logprobs = (
            text_logprobs(echo.logprobs, self._generation.tokens_as_ids)
            if self._generation.logprobs
            else None
        )
        return self._event(TextChoice(echo.text, None, index, logprobs, self._ids([])), None)

    def piece(self, index: int, piece: AnswerPiece, usage: TokenUsage | None) -> bytes:
        """See `Writer`."""
        if self._plain and piece.finish_reason is None:
            return self._template(index).fill(piece.delta.content)
        choice = TextChoice(
            piece.delta.content, piece.finish_reason, index, self._logprobs(piece, None), self._ids(piece.token_ids)
        )
        return self._event(choice, usage)

    def usage(self, usage: TokenUsage) -> bytes:
        """See `Writer`."""
        return event(_encode(self._response([], usage_body(usage))))

    def whole(self, choices: list[Choice], usage: TokenUsage) -> bytes:
        """See `Writer`."""
        written = [
            TextChoice(
                (choice.echo.text if choice.echo else "") + choice.piece.delta.content,
                choice.piece.finish_reason,
                choice.index,
                self._logprobs(choice.piece, choice.echo),
                self._ids(choice.piece.token_ids),
                self._ids(choice.prompt),
            )
            for choice in choices
        ]
        return _encode(self._response(written, usage_body(usage)))

    def _template(self, index: int) -> Template:
        found = self._templates.get(index)
        if found is None:
            found = self._templates[index] = Template(self._event(TextChoice(SLOT, None, index), None))
        return found

    def _logprobs(self, piece: AnswerPiece, echo: EchoedPrompt | None) -> TextLogprobs | None:
        if not self._generation.logprobs:
            return None
        return text_logprobs(
            [*(echo.logprobs if echo else ()), *piece.logprobs], self._generation.tokens_as_ids
        )

    def _event(self, choice: TextChoice, usage: TokenUsage | None) -> bytes:
        return event(
            _encode(self._response([choice], self._no_usage if usage is None else usage_body(usage)))
        )

    def _response(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> CompletionResponse:
        return CompletionResponse(self._id, self._created, self._model, choices, usage=usage)


def delta(given: OutputDelta) -> Delta:
    """Return what a chunk adds to a chat's answer."""
    if not given.reasoning and not given.tool_calls:
        return Delta(content=given.content)
    found = Delta(reasoning_content=given.reasoning or UNSET, content=given.content or UNSET)
    if given.tool_calls:
        found.tool_calls = [call_chunk(call) for call in given.tool_calls]
    return found


def call_chunk(call: ToolCallDelta) -> ToolCallChunk:
    """Return more of a tool call as a chunk has it."""
    function = CalledFunctionDelta(UNSET if call.name is None else call.name, call.arguments)
    if call.id is None:
        return ToolCallChunk(call.index, function)
    return ToolCallChunk(call.index, function, call.id, "function")


def message(given: OutputDelta) -> AnswerMessage:
    """Return a chat's whole answer."""
    calls = called(given.tool_calls)
    found = AnswerMessage(given.content or None if calls else given.content)
    if given.reasoning:
        found.reasoning_content = given.reasoning
    if calls:
        found.tool_calls = calls
    return found


def called(pieces: Iterable[ToolCallDelta]) -> list[AnsweredCall]:
    """Return whole tool calls of their pieces, in the order of their indices."""
    found: dict[int, AnsweredCall] = {}
    for piece in pieces:
        call = found.setdefault(piece.index, AnsweredCall("", AnsweredFunction("", "")))
        call.id = piece.id or call.id
        call.function.name = piece.name or call.function.name
        call.function.arguments += piece.arguments
    return [found[index] for index in sorted(found)]
