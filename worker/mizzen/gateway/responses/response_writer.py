"""A response as it grows: its items, and the events that tell of them."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from mizzen.gateway.errors import ApiError
from mizzen.gateway.openai.response_writers import Choice, called
from mizzen.gateway.requests.answer import AnswerPiece
from mizzen.gateway.requests.output import ToolCallDelta
from mizzen.gateway.requests.sequence import EchoedPrompt
from mizzen.gateway.requests.usage import TokenUsage
from mizzen.gateway.responses.parse import Asked
from mizzen.gateway.responses.response_bodies import (
    Incomplete,
    InputTokensDetails,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    ReasoningPart,
    ResponseError,
    ResponsesResponse,
    ResponseUsage,
)

_encode = msgspec.json.Encoder().encode


class ResponsesWriter:
    """Writes one response; a `mizzen.gateway.openai.response_writers.Writer`.

    One item is open at a time. What it holds is added to it as it comes, so that the last event, and a
    response without stream, hold the same items.
    """

    def __init__(self, asked: Asked) -> None:
        self._response = new_response(asked)
        self._number = 0
        self._open: OutputItem | None = None
        self._pieces: list[str] = []
        self._cut = False
        self._streams = asked.generation.stream
        self._events: list[bytes] = []

    # ── a stream ──────────────────────────────────────────────────────────────────────────────────────────

    def first(self, index: int, echo: EchoedPrompt | None) -> bytes:
        """See `Writer`."""
        self._event("response.created", response=self._response)
        self._event("response.in_progress", response=self._response)
        return self._take()

    def piece(self, index: int, piece: AnswerPiece, usage: TokenUsage | None) -> bytes:
        """See `Writer`."""
        delta = piece.delta
        if delta.reasoning:
            self._reasoning(delta.reasoning)
        if delta.content:
            self._content(delta.content)
        for call in delta.tool_calls:
            self._call(call)
        if piece.finish_reason is not None:
            self._end(piece.finish_reason)
        return self._take()

    def usage(self, usage: TokenUsage) -> bytes:
        """Return the last event: the whole response, with its usage."""
        self._finish(usage)
        kind = "response.incomplete" if self._cut else "response.completed"
        self._event(kind, response=self._response)
        return self._take()

    def end(self) -> bytes:
        """See `Writer`; there is no [DONE]."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a stream that cannot go on."""
        self._close("incomplete")
        response = self._response
        response.status = "failed"
        response.error = ResponseError("server_error", error.message)
        self._event("response.failed", response=response)
        return self._take()

    # ── a whole response ──────────────────────────────────────────────────────────────────────────────────

    def whole(self, choices: list[Choice], usage: TokenUsage) -> bytes:
        """See `Writer`."""
        piece = choices[0].piece
        if piece.delta.reasoning:
            self._reasoning(piece.delta.reasoning)
        if piece.delta.content:
            self._content(piece.delta.content)
        for index, call in enumerate(called(piece.delta.tool_calls)):
            self._call(ToolCallDelta(index, call.id, call.function.name, call.function.arguments))
        self._end(piece.finish_reason or "stop")
        self._finish(usage)
        return _encode(self._response)

    # ── items ─────────────────────────────────────────────────────────────────────────────────────────────

    def _reasoning(self, text: str) -> None:
        if not isinstance(self._open, OutputReasoning):
            self._add(OutputReasoning(new_id("rs_"), "in_progress", []))
            self._on_item("response.content_part.added", content_index=0, part=ReasoningPart(""))
        self._pieces.append(text)
        self._on_item("response.reasoning_text.delta", content_index=0, delta=text)

    def _content(self, text: str) -> None:
        if not isinstance(self._open, OutputMessage):
            self._add(OutputMessage(new_id("msg_"), "in_progress", []))
            self._on_item("response.content_part.added", content_index=0, part=OutputText(""))
        self._pieces.append(text)
        self._on_item("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _call(self, call: ToolCallDelta) -> None:
        if call.id is not None:
            self._add(OutputCall(new_id("fc_"), "in_progress", call.id, call.name or "", ""))
        if call.arguments:
            self._pieces.append(call.arguments)
            self._on_item("response.function_call_arguments.delta", delta=call.arguments)

    def _add(self, item: OutputItem) -> None:
        self._close("completed")
        self._open = item
        self._pieces = []
        self._response.output.append(item)
        index = len(self._response.output) - 1
        self._event("response.output_item.added", output_index=index, item=item)

    def _close(self, status: str) -> None:
        """End the item that is open."""
        item, text = self._open, "".join(self._pieces)
        if item is None:
            return
        item.status = status
        if isinstance(item, OutputCall):
            item.arguments = text
            self._on_item("response.function_call_arguments.done", name=item.name, arguments=text)
        elif isinstance(item, OutputReasoning):
            item.content.append(ReasoningPart(text))
            self._on_item("response.reasoning_text.done", content_index=0, text=text)
            self._on_item("response.content_part.done", content_index=0, part=item.content[0])
        else:
            item.content.append(OutputText(text))
            self._on_item("response.output_text.done", content_index=0, text=text, logprobs=[])
            self._on_item("response.content_part.done", content_index=0, part=item.content[0])
        index = len(self._response.output) - 1
        self._event("response.output_item.done", output_index=index, item=item)
        self._open = None

    def _end(self, reason: str) -> None:
        """End the last item. A call that the model did not end is incomplete, whatever has ended it."""
        self._cut = reason == "length"
        broken = isinstance(self._open, OutputCall) and reason != "tool_calls"
        self._close("incomplete" if self._cut or broken else "completed")

    def _finish(self, usage: TokenUsage) -> None:
        response = self._response
        response.status = "incomplete" if self._cut else "completed"
        response.incomplete_details = Incomplete("max_output_tokens") if self._cut else None
        response.completed_at = None if self._cut else int(time.time())
        response.usage = counted(usage)

    # ── events ────────────────────────────────────────────────────────────────────────────────────────────

    def _on_item(self, kind: str, **fields: Any) -> None:
        if self._open is not None:
            index = len(self._response.output) - 1
            self._event(kind, item_id=self._open.id, output_index=index, **fields)

    def _event(self, kind: str, **fields: Any) -> None:
        if not self._streams:
            return
        data = _encode({"type": kind, "sequence_number": self._number, **fields})
        self._events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
        self._number += 1

    def _take(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events


def new_id(prefix: str) -> str:
    """Return an id in OpenAI's form."""
    return prefix + uuid.uuid4().hex


def counted(usage: TokenUsage) -> ResponseUsage:
    """Return counts of tokens under the names that responses have for them."""
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.cached_tokens),
        usage.output_tokens,
        OutputTokensDetails(usage.reasoning_tokens),
        usage.prompt_tokens + usage.output_tokens,
    )


def new_response(asked: Asked) -> ResponsesResponse:
    """Return a response that has just begun, with what was asked for."""
    request, sampling = asked.request, asked.generation.sampling
    reasoning, text = request.reasoning, request.text
    form = text.format if text is not None and text.format is not None else None
    return ResponsesResponse(
        id=new_id("resp_"),
        created_at=int(time.time()),
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=request.model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        prompt_cache_key=request.prompt_cache_key,
        reasoning={"effort": None if reasoning is None else reasoning.effort, "summary": None},
        safety_identifier=request.safety_identifier,
        temperature=sampling.temperature,
        text={"format": {"type": "text"} if form is None else msgspec.to_builtins(form)},
        tool_choice=request.tool_choice or "auto",
        tools=[
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict,
            }
            for tool in request.tools or ()
        ],
        top_p=1.0 if request.top_p is None else request.top_p,
        user=request.user,
    )
