"""Answers as JSON: the events of a stream, and whole responses, of both endpoints."""

from __future__ import annotations

import time
import uuid
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from mizzen.gateway.openai.bodies import (
    AnswerMessage,
    ChatChoice,
    ChatResponse,
    Chunk,
    ChunkChoice,
    CompletionResponse,
    Delta,
    TextChoice,
    Usage,
)
from mizzen.gateway.openai.wish import Wish

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(data: bytes) -> bytes:
    """Return a server-sent event."""
    return b"data: " + data + b"\n\n"


class Writer(Protocol):
    """Writes one answer."""

    def first(self) -> bytes:
        """Return the events that a stream begins with."""
        ...

    def piece(self, text: str, ids: list[int], reason: str | None) -> bytes:
        """Return the events for more text, or for the end."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """Return the event that holds the usage alone."""
        ...

    def whole(self, text: str, ids: list[int], reason: str, usage: Usage) -> bytes:
        """Return the response of a request without stream."""
        ...


class _Writer:
    prefix = ""

    def __init__(self, wish: Wish) -> None:
        self._id = self.prefix + uuid.uuid4().hex
        self._created = int(time.time())
        self._model = wish.model
        self._return_ids = wish.return_token_ids
        self._no_usage: UnsetType | None = None if wish.include_usage else UNSET

    def _ids(self, ids: list[int]) -> list[int] | UnsetType:
        return ids if self._return_ids else UNSET


class ChatWriter(_Writer):
    """Writes chat completions."""

    prefix = "chatcmpl-"

    def first(self) -> bytes:
        """See `Writer`."""
        return self._chunk(ChunkChoice(Delta(role="assistant", content="")))

    def piece(self, text: str, ids: list[int], reason: str | None) -> bytes:
        """See `Writer`."""
        if reason is None:
            return self._chunk(ChunkChoice(Delta(content=text), token_ids=self._ids(ids)))
        if not text and not (ids and self._return_ids):
            return self._chunk(ChunkChoice(Delta(), reason))
        last = ChunkChoice(Delta(content=text), token_ids=self._ids(ids))
        return self._chunk(last) + self._chunk(ChunkChoice(Delta(), reason))

    def usage(self, usage: Usage) -> bytes:
        """See `Writer`."""
        return event(_encode(Chunk(self._id, self._created, self._model, [], usage=usage)))

    def whole(self, text: str, ids: list[int], reason: str, usage: Usage) -> bytes:
        """See `Writer`."""
        choice = ChatChoice(AnswerMessage(text), reason, token_ids=self._ids(ids))
        return _encode(ChatResponse(self._id, self._created, self._model, [choice], usage))

    def _chunk(self, choice: ChunkChoice) -> bytes:
        return event(_encode(Chunk(self._id, self._created, self._model, [choice], usage=self._no_usage)))


class CompletionWriter(_Writer):
    """Writes text completions."""

    prefix = "cmpl-"

    def first(self) -> bytes:
        """See `Writer`."""
        return b""

    def piece(self, text: str, ids: list[int], reason: str | None) -> bytes:
        """See `Writer`."""
        choice = TextChoice(text, reason, token_ids=self._ids(ids))
        return event(_encode(self._response([choice], self._no_usage)))

    def usage(self, usage: Usage) -> bytes:
        """See `Writer`."""
        return event(_encode(self._response([], usage)))

    def whole(self, text: str, ids: list[int], reason: str, usage: Usage) -> bytes:
        """See `Writer`."""
        return _encode(self._response([TextChoice(text, reason, token_ids=self._ids(ids))], usage))

    def _response(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> CompletionResponse:
        return CompletionResponse(self._id, self._created, self._model, choices, usage=usage)
