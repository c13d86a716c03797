# SPDX-License-Identifier: Apache-2.0
"""Encode a response of the Messages API: its content blocks, and the stream events about them."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from msgspec import Raw

from mizzen.gateway.anthropic.response_bodies import (
    AnswerText,
    AnswerThinking,
    AnswerToolUse,
    ContentBlock,
    MessageResponse,
    MessageUsage,
    ThinkingTokens,
)
from mizzen.gateway.openai.response_writers import PLACEHOLDER, EventTemplate
from mizzen.gateway.requests.answer import AnswerPiece, join_tool_calls
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.response_writer import FinishedChoice
from mizzen.gateway.requests.sequence import EchoedPrompt
from mizzen.gateway.requests.usage import TokenUsage

NO_INPUT = Raw(b"{}")
DELTA_FIELDS: dict[type[ContentBlock], tuple[str, str]] = {
    AnswerText: ("text_delta", "text"),
    AnswerThinking: ("thinking_delta", "thinking"),
    AnswerToolUse: ("input_json_delta", "partial_json"),
}
"""Type of the deltas of each type of block, and the field that holds the new text."""
_encode = msgspec.json.Encoder().encode


class MessagesWriter:
    """`ResponseWriter` of the Messages API. In a stream, one content block is open at a time."""

    def __init__(self, generation: GenerationRequest) -> None:
        self._id = "msg_" + uuid.uuid4().hex
        self._model = generation.model
        self._max_tokens = generation.sampling.max_tokens
        self._block_count = 0
        self._open: ContentBlock | None = None
        self._opened: set[type[ContentBlock]] = set()
        """Types of the blocks with text so far."""
        self._delta: EventTemplate | None = None
        """Template of the delta events of the open block."""
        self._events: list[bytes] = []
        self._last_piece: AnswerPiece | None = None

    # ── streaming ──────────────────────────────────────────────────────────────────────────────────────────

    def start_choice(self, index: int, echo: EchoedPrompt | None, prompt_tokens: int) -> bytes:
        """Return the events that start the message: `message_start` and `ping`.

        The tokens from the prefix cache are known only at the end, so all count as `input_tokens` here.
        """
        usage = message_usage(TokenUsage(prompt_tokens, 0))
        message = MessageResponse(id=self._id, model=self._model, content=[], usage=usage)
        self._event("message_start", message=message)
        self._event("ping")
        return self._take_events()

    def write_piece(self, index: int, piece: AnswerPiece, usage: TokenUsage | None) -> bytes:
        """Return the events for a piece of the output; the last piece ends the open block."""
        delta = piece.delta
        if delta.reasoning:
            self._add_to(AnswerThinking("", ""), delta.reasoning)
        if delta.content:
            self._add_to(AnswerText(""), delta.content)
        for call in join_tool_calls(delta.tool_calls):
            if call.id is not None:
                self._open_block(AnswerToolUse(call.id, call.name or "", NO_INPUT))
            if call.arguments:
                self._add_text(call.arguments)
        if piece.finish_reason is not None:
            self._close_block()
            self._last_piece = piece
        return self._take_events()

    def write_usage(self, usage: TokenUsage) -> bytes:
        """Return the event `message_delta`, with the stop reason and the final token counts."""
        reason, sequence = self._stop_reason(self._last_piece, usage)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        self._event("message_delta", delta=delta, usage=message_usage(usage))
        return self._take_events()

    def end_stream(self) -> bytes:
        """Return the event `message_stop`, which ends a stream."""
        self._event("message_stop")
        return self._take_events()

    # ── without streaming ──────────────────────────────────────────────────────────────────────────────────

    def full_response(self, choices: list[FinishedChoice], usage: TokenUsage) -> bytes:
        """Return the body of a response that is not streamed."""
        piece = choices[0].piece
        reason, sequence = self._stop_reason(piece, usage)
        response = MessageResponse(
            id=self._id,
            model=self._model,
            content=content_blocks(piece),
            stop_reason=reason,
            stop_sequence=sequence,
            usage=message_usage(usage),
        )
        return _encode(response)

    def _stop_reason(self, piece: AnswerPiece | None, usage: TokenUsage) -> tuple[str, str | None]:
        """Return the stop reason of an answer whose last piece is `piece`, and its stop sequence if any."""
        finish = None if piece is None else piece.finish_reason
        if finish == "tool_calls":
            return "tool_use", None
        if finish == "length":
            full = self._max_tokens is not None and usage.output_tokens < self._max_tokens
            return "model_context_window_exceeded" if full else "max_tokens", None
        stop_string = None if piece is None else piece.stop_string
        return ("end_turn", None) if stop_string is None else ("stop_sequence", stop_string)

    # ── events ────────────────────────────────────────────────────────────────────────────────────────────

    def _add_to(self, block: ContentBlock, text: str) -> None:
        """Add text to the open block; open `block` first if that has another type.

        Line breaks that separate the text from an earlier block of its type are dropped.
        """
        kind = type(block)
        if not isinstance(self._open, kind):
            text = text.lstrip("\n") if kind in self._opened else text
            self._opened.add(kind)
            self._open_block(block)
        self._add_text(text)

    def _open_block(self, block: ContentBlock) -> None:
        self._close_block()
        self._open = block
        index = self._block_count
        self._event("content_block_start", index=index, content_block=block)
        kind, field = DELTA_FIELDS[type(block)]
        delta = {"type": kind, field: PLACEHOLDER}
        self._delta = EventTemplate(encode_event("content_block_delta", index=index, delta=delta))

    def _add_text(self, text: str) -> None:
        if self._delta is not None:
            self._events.append(self._delta.fill(text))

    def _close_block(self) -> None:
        """End the open block, if there is one."""
        if self._open is None:
            return
        index = self._block_count
        if isinstance(self._open, AnswerThinking):
            delta = {"type": "signature_delta", "signature": new_signature()}
            self._event("content_block_delta", index=index, delta=delta)
        self._event("content_block_stop", index=index)
        self._open, self._delta = None, None
        self._block_count += 1

    def _event(self, kind: str, **fields: Any) -> None:
        self._events.append(encode_event(kind, **fields))

    def _take_events(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events


def encode_event(kind: str, **fields: Any) -> bytes:
    """Return a server-sent event of the Messages API."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def content_blocks(piece: AnswerPiece) -> list[ContentBlock]:
    """Return the content blocks of a whole answer."""
    delta = piece.delta
    blocks: list[ContentBlock] = []
    if delta.reasoning:
        blocks.append(AnswerThinking(delta.reasoning, new_signature()))
    if delta.content:
        blocks.append(AnswerText(delta.content))
    calls = join_tool_calls(delta.tool_calls)
    return blocks + [
        AnswerToolUse(call.id or "", call.name or "", call_input(call.arguments)) for call in calls
    ]


def call_input(arguments: str) -> Raw:
    """Return the arguments of a call as a JSON object; an empty one if the call was cut off within them."""
    encoded = arguments.encode()
    try:
        msgspec.json.decode(encoded, type=dict[str, Raw])
    except (msgspec.DecodeError, RecursionError):
        return NO_INPUT
    return Raw(encoded)


def new_signature() -> str:
    """Return an opaque signature for a thinking block; some clients send back only blocks that have one."""
    return uuid.uuid4().hex


def message_usage(usage: TokenUsage) -> MessageUsage:
    """Convert token counts to the shape of the Messages API."""
    return MessageUsage(
        usage.prompt_tokens - usage.cached_tokens,
        usage.output_tokens,
        usage.cached_tokens,
        ThinkingTokens(usage.reasoning_tokens),
    )
