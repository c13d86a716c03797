# SPDX-License-Identifier: Apache-2.0
"""`ResponseWriter`s of chat and text completions: stream events and complete responses as JSON."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

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
from mizzen.gateway.requests.answer import AnswerPiece, join_tool_calls
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.output import OutputDelta, ToolCallDelta
from mizzen.gateway.requests.response_writer import FinishedChoice
from mizzen.gateway.requests.sequence import EchoedPrompt
from mizzen.gateway.requests.usage import TokenUsage

DONE = b"data: [DONE]\n\n"
PLACEHOLDER = "\u0000mizzen\u0000"
"""Placeholder for the text in an event template; model names cannot contain it."""
_encode = msgspec.json.Encoder().encode


def sse_event(data: bytes) -> bytes:
    """Return a server-sent event with this data."""
    return b"data: " + data + b"\n\n"


class EventTemplate:
    """A stream event in which only the text varies: encoded once, and filled in for each piece of text."""

    __slots__ = ("_after", "_before")

    def __init__(self, encoded: bytes) -> None:
        """Split an encoded event at the `PLACEHOLDER` that it contains."""
        self._before, self._after = encoded.split(_encode(PLACEHOLDER))

    def fill(self, text: str) -> bytes:
        """Return the event with a text filled in."""
        return self._before + _encode(text) + self._after


class _BaseWriter:
    prefix = ""

    def __init__(self, generation: GenerationRequest) -> None:
        self._id = self.prefix + uuid.uuid4().hex
        self._created = int(time.time())
        self._generation = generation
        self._model = generation.model
        self._no_usage: UnsetType | None = None if generation.include_usage else UNSET
        self._text_only = not (
            generation.logprobs or generation.return_token_ids or generation.continuous_usage
        )
        """True if events with content contain no log probabilities, token ids or usage; only texts differ."""
        self._templates: dict[int, EventTemplate] = {}

    def end_stream(self) -> bytes:
        """Return the event `[DONE]`, which ends a stream."""
        return DONE

    def _token_ids(self, ids: list[int]) -> list[int] | UnsetType:
        return ids if self._generation.return_token_ids else UNSET


class ChatWriter(_BaseWriter):
    """`ResponseWriter` of chat completions."""

    prefix = "chatcmpl-"

    def start_choice(self, index: int, echo: EchoedPrompt | None, prompt_tokens: int) -> bytes:
        """Return the event that starts a choice: an assistant message without content."""
        return self._encode_chunk(ChunkChoice(Delta(role="assistant", content=""), index=index), None)

    def write_piece(self, index: int, piece: AnswerPiece, usage: TokenUsage | None) -> bytes:
        """Return the events for a piece of a choice; the last piece adds an event with the finish reason.

        If the piece needs several events (see `chat_deltas`), its log probabilities and token ids are in the
        first one.
        """
        delta = piece.delta
        if self._text_only and piece.finish_reason is None and not delta.reasoning and not delta.tool_calls:
            return self._text_template(index).fill(delta.content)
        logprobs, events = self._logprobs(piece), b""
        has_details = logprobs is not None or (self._generation.return_token_ids and piece.token_ids)
        if piece.delta or has_details:
            first, *more = chat_deltas(delta)
            token_ids = self._token_ids(piece.token_ids)
            events = self._encode_chunk(ChunkChoice(first, None, index, logprobs, token_ids), usage)
            for part in more:
                choice = ChunkChoice(part, None, index, None, self._token_ids([]))
                events += self._encode_chunk(choice, usage)
        if piece.finish_reason is not None:
            events += self._encode_chunk(ChunkChoice(Delta(), piece.finish_reason, index), usage)
        return events

    def write_usage(self, usage: TokenUsage) -> bytes:
        """Return the event that carries only the usage."""
        return sse_event(_encode(Chunk(self._id, self._created, self._model, [], usage=usage_body(usage))))

    def full_response(self, choices: list[FinishedChoice], usage: TokenUsage) -> bytes:
        """Return the body of a chat response that is not streamed."""
        chat_choices = [
            ChatChoice(
                chat_message(choice.piece.delta),
                choice.piece.finish_reason or "stop",
                choice.index,
                self._logprobs(choice.piece),
                self._token_ids(choice.piece.token_ids),
            )
            for choice in choices
        ]
        response = ChatResponse(self._id, self._created, self._model, chat_choices, usage_body(usage))
        response.prompt_token_ids = self._token_ids(choices[0].prompt)
        return _encode(response)

    def _text_template(self, index: int) -> EventTemplate:
        template = self._templates.get(index)
        if template is None:
            encoded = self._encode_chunk(ChunkChoice(Delta(content=PLACEHOLDER), index=index), None)
            template = self._templates[index] = EventTemplate(encoded)
        return template

    def _logprobs(self, piece: AnswerPiece) -> ChatLogprobs | None:
        if not piece.logprobs or not self._generation.logprobs:
            return None
        return chat_logprobs(piece.logprobs, self._generation.tokens_as_ids)

    def _encode_chunk(self, choice: ChunkChoice, usage: TokenUsage | None) -> bytes:
        usage_field = self._no_usage if usage is None else usage_body(usage)
        return sse_event(_encode(Chunk(self._id, self._created, self._model, [choice], usage=usage_field)))


class CompletionWriter(_BaseWriter):
    """`ResponseWriter` of text completions."""

    prefix = "cmpl-"

    def start_choice(self, index: int, echo: EchoedPrompt | None, prompt_tokens: int) -> bytes:
        """Return the event with the echoed prompt; empty if the request does not set `echo`."""
        if echo is None:
            return b""
        logprobs = (
            text_logprobs(echo.logprobs, self._generation.tokens_as_ids)
            if self._generation.logprobs
            else None
        )
        return self._encode_event(TextChoice(echo.text, None, index, logprobs, self._token_ids([])), None)

    def write_piece(self, index: int, piece: AnswerPiece, usage: TokenUsage | None) -> bytes:
        """Return the event for a piece of a choice; the last piece's event has the finish reason."""
        if self._text_only and piece.finish_reason is None:
            return self._text_template(index).fill(piece.delta.content)
        choice = TextChoice(
            piece.delta.content,
            piece.finish_reason,
            index,
            self._logprobs(piece, None),
            self._token_ids(piece.token_ids),
        )
        return self._encode_event(choice, usage)

    def write_usage(self, usage: TokenUsage) -> bytes:
        """Return the event that carries only the usage."""
        return sse_event(_encode(self._new_response([], usage_body(usage))))

    def full_response(self, choices: list[FinishedChoice], usage: TokenUsage) -> bytes:
        """Return the body of a completion response that is not streamed; its texts include echoed prompts."""
        text_choices = [
            TextChoice(
                (choice.echo.text if choice.echo else "") + choice.piece.delta.content,
                choice.piece.finish_reason,
                choice.index,
                self._logprobs(choice.piece, choice.echo),
                self._token_ids(choice.piece.token_ids),
                self._token_ids(choice.prompt),
            )
            for choice in choices
        ]
        return _encode(self._new_response(text_choices, usage_body(usage)))

    def _text_template(self, index: int) -> EventTemplate:
        template = self._templates.get(index)
        if template is None:
            template = self._templates[index] = EventTemplate(
                self._encode_event(TextChoice(PLACEHOLDER, None, index), None)
            )
        return template

    def _logprobs(self, piece: AnswerPiece, echo: EchoedPrompt | None) -> TextLogprobs | None:
        if not self._generation.logprobs:
            return None
        return text_logprobs(
            [*(echo.logprobs if echo else ()), *piece.logprobs], self._generation.tokens_as_ids
        )

    def _encode_event(self, choice: TextChoice, usage: TokenUsage | None) -> bytes:
        return sse_event(
            _encode(self._new_response([choice], self._no_usage if usage is None else usage_body(usage)))
        )

    def _new_response(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> CompletionResponse:
        return CompletionResponse(self._id, self._created, self._model, choices, usage=usage)


def chat_deltas(delta: OutputDelta) -> list[Delta]:
    """Convert an output delta to the deltas of one or more chat stream events.

    Each has either reasoning, or content, or part of one tool call, because many clients read only one of
    them: only the first tool call, for example, or content only if there is no reasoning.
    """
    deltas = [Delta(reasoning_content=delta.reasoning)] if delta.reasoning else []
    if delta.content:
        deltas.append(Delta(content=delta.content))
    for call in join_tool_calls(delta.tool_calls):
        deltas += [Delta(tool_calls=[chunk]) for chunk in tool_call_chunks(call)]
    return deltas or [Delta(content="")]


def tool_call_chunks(call: ToolCallDelta) -> list[ToolCallChunk]:
    """Convert part of a tool call to its shape in one or two chat stream events.

    As in OpenAI's streams, the first event of a call has empty arguments: some clients ignore the arguments
    in it, and others count them twice.
    """
    chunks = []
    if call.id is not None:
        function = CalledFunctionDelta(call.name or "", "")
        chunks.append(ToolCallChunk(call.index, function, call.id, "function"))
    if call.arguments or not chunks:
        chunks.append(ToolCallChunk(call.index, CalledFunctionDelta(UNSET, call.arguments)))
    return chunks


def chat_message(delta: OutputDelta) -> AnswerMessage:
    """Convert the whole output of a choice to the message of a chat response."""
    calls = answered_calls(delta.tool_calls)
    message = AnswerMessage(delta.content or None if calls else delta.content)
    if delta.reasoning:
        message.reasoning_content = delta.reasoning
    if calls:
        message.tool_calls = calls
    return message


def answered_calls(parts: Sequence[ToolCallDelta]) -> list[AnsweredCall]:
    """Join the parts of tool calls into complete calls, in the shape of a chat response."""
    return [
        AnsweredCall(call.id or "", AnsweredFunction(call.name or "", call.arguments))
        for call in join_tool_calls(parts)
    ]
