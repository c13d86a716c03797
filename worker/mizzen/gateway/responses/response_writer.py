# SPDX-License-Identifier: Apache-2.0
"""Encode a response of the Responses API: its output items, and the stream events about them."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from mizzen.gateway.errors import ApiError
from mizzen.gateway.requests.answer import AnswerPiece, join_tool_calls
from mizzen.gateway.requests.output import ToolCallDelta
from mizzen.gateway.requests.response_writer import FinishedChoice
from mizzen.gateway.requests.sequence import EchoedPrompt
from mizzen.gateway.requests.usage import TokenUsage
from mizzen.gateway.responses.parse import ParsedResponsesRequest
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
from mizzen.gateway.responses.stored_input import NewTurn
from mizzen.gateway.responses.tools import CallName

_encode = msgspec.json.Encoder().encode


class ResponsesWriter:
    """`ResponseWriter` of the Responses API.

    One output item is open at a time, and new text is added to it. The last event of a stream therefore holds
    the same items as a response without streaming, in which all reasoning is one item, and so is all text.
    """

    def __init__(self, parsed: ParsedResponsesRequest, turn: NewTurn | None = None) -> None:
        """Create a writer; `turn` is the stored conversation's new turn, if the gateway stores responses."""
        self._response = new_response(parsed)
        self._turn = turn
        if turn is not None:
            self._response.previous_response_id = turn.previous_id
            self._response.store = turn.stored
        self._call_names = parsed.tools.call_names
        self._sequence_number = 0
        self._open_item: OutputItem | None = None
        self._open_text: list[str] = []
        self._truncated = False
        self._streams = parsed.generation.stream
        self._events: list[bytes] = []

    # ── streaming ──────────────────────────────────────────────────────────────────────────────────────────

    def start_choice(self, index: int, echo: EchoedPrompt | None, prompt_tokens: int) -> bytes:
        """Return the events that start the response: `response.created` and `response.in_progress`."""
        self._event("response.created", response=self._response)
        self._event("response.in_progress", response=self._response)
        return self._take_events()

    def write_piece(self, index: int, piece: AnswerPiece, usage: TokenUsage | None) -> bytes:
        """Return the events for a piece of the output; the last piece finishes the output items."""
        delta = piece.delta
        if delta.reasoning:
            self._add_reasoning(delta.reasoning)
        if delta.content:
            self._add_content(delta.content)
        for call in join_tool_calls(delta.tool_calls):
            self._add_call(call)
        if piece.finish_reason is not None:
            self._end_output(piece.finish_reason)
        return self._take_events()

    def write_usage(self, usage: TokenUsage) -> bytes:
        """Return the last event: the complete response with its usage."""
        self._complete(usage)
        kind = "response.incomplete" if self._truncated else "response.completed"
        self._event(kind, response=self._response)
        return self._take_events()

    def end_stream(self) -> bytes:
        """Return empty bytes, because the Responses API has no `[DONE]` event."""
        return b""

    def failure_event(self, error: ApiError) -> bytes:
        """Return the events that end a failed stream; the last one is `response.failed`."""
        self._close_item("incomplete")
        response = self._response
        response.status = "failed"
        response.error = ResponseError("server_error", error.message)
        self._event("response.failed", response=response)
        return self._take_events()

    # ── without streaming ──────────────────────────────────────────────────────────────────────────────────

    def full_response(self, choices: list[FinishedChoice], usage: TokenUsage) -> bytes:
        """Return the body of a response that is not streamed."""
        piece = choices[0].piece
        if piece.delta.reasoning:
            self._add_reasoning(piece.delta.reasoning)
        if piece.delta.content:
            self._add_content(piece.delta.content)
        for call in join_tool_calls(piece.delta.tool_calls):
            self._add_call(call)
        self._end_output(piece.finish_reason or "stop")
        self._complete(usage)
        return _encode(self._response)

    # ── items ─────────────────────────────────────────────────────────────────────────────────────────────

    def _add_reasoning(self, text: str) -> None:
        if not isinstance(self._open_item, OutputReasoning):
            text = self._item_start(OutputReasoning, text)
            self._begin_item(OutputReasoning(new_id("rs_"), "in_progress", []))
            self._item_event("response.content_part.added", content_index=0, part=ReasoningPart(""))
        self._open_text.append(text)
        self._item_event("response.reasoning_text.delta", content_index=0, delta=text)

    def _add_content(self, text: str) -> None:
        if not isinstance(self._open_item, OutputMessage):
            text = self._item_start(OutputMessage, text)
            self._begin_item(OutputMessage(new_id("msg_"), "in_progress", []))
            self._item_event("response.content_part.added", content_index=0, part=OutputText(""))
        self._open_text.append(text)
        self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _add_call(self, call: ToolCallDelta) -> None:
        if call.id is not None:
            name = self._call_names.get(call.name or "", CallName(call.name or ""))
            item = OutputCall(new_id("fc_"), "in_progress", call.id, name.name, "")
            item.namespace = msgspec.UNSET if name.namespace is None else name.namespace
            self._begin_item(item)
        if call.arguments:
            self._open_text.append(call.arguments)
            self._item_event("response.function_call_arguments.delta", delta=call.arguments)

    def _item_start(self, kind: type[OutputItem], text: str) -> str:
        """Return an item's first text, without line breaks that separate it from the last of its kind."""
        return text.lstrip("\n") if any(isinstance(item, kind) for item in self._response.output) else text

    def _begin_item(self, item: OutputItem) -> None:
        self._close_item("completed")
        self._open_item = item
        self._open_text = []
        self._response.output.append(item)
        index = len(self._response.output) - 1
        self._event("response.output_item.added", output_index=index, item=item)

    def _close_item(self, status: str) -> None:
        """Finish the open item, if there is one, and set its status."""
        item, text = self._open_item, "".join(self._open_text)
        if item is None:
            return
        item.status = status
        if isinstance(item, OutputCall):
            item.arguments = text
            self._item_event("response.function_call_arguments.done", name=item.name, arguments=text)
        elif isinstance(item, OutputReasoning):
            item.content.append(ReasoningPart(text))
            self._item_event("response.reasoning_text.done", content_index=0, text=text)
            self._item_event("response.content_part.done", content_index=0, part=item.content[0])
        else:
            item.content.append(OutputText(text))
            self._item_event("response.output_text.done", content_index=0, text=text, logprobs=[])
            self._item_event("response.content_part.done", content_index=0, part=item.content[0])
        index = len(self._response.output) - 1
        self._event("response.output_item.done", output_index=index, item=item)
        self._open_item = None

    def _end_output(self, reason: str) -> None:
        """Finish the last item; it is `incomplete` if the answer was truncated within it.

        A call is also `incomplete` if the finish reason is not `tool_calls`.
        """
        self._truncated = reason == "length"
        broken = isinstance(self._open_item, OutputCall) and reason != "tool_calls"
        self._close_item("incomplete" if self._truncated or broken else "completed")

    def _complete(self, usage: TokenUsage) -> None:
        response = self._response
        response.status = "incomplete" if self._truncated else "completed"
        response.incomplete_details = Incomplete("max_output_tokens") if self._truncated else None
        response.completed_at = None if self._truncated else int(time.time())
        response.usage = response_usage(usage)
        if self._turn is not None and self._turn.stored:
            self._turn.store(response)

    # ── events ────────────────────────────────────────────────────────────────────────────────────────────

    def _item_event(self, kind: str, **fields: Any) -> None:
        if self._open_item is not None:
            index = len(self._response.output) - 1
            self._event(kind, item_id=self._open_item.id, output_index=index, **fields)

    def _event(self, kind: str, **fields: Any) -> None:
        if not self._streams:
            return
        data = _encode({"type": kind, "sequence_number": self._sequence_number, **fields})
        self._events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
        self._sequence_number += 1

    def _take_events(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events


def new_id(prefix: str) -> str:
    """Return a new id in OpenAI's form: the prefix and a random number."""
    return prefix + uuid.uuid4().hex


def response_usage(usage: TokenUsage) -> ResponseUsage:
    """Convert token counts to the shape of the Responses API."""
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.cached_tokens),
        usage.output_tokens,
        OutputTokensDetails(usage.reasoning_tokens),
        usage.prompt_tokens + usage.output_tokens,
    )


def new_response(parsed: ParsedResponsesRequest) -> ResponsesResponse:
    """Return a response that is in progress and has no output yet, with the settings of its request."""
    request, sampling = parsed.request, parsed.generation.sampling
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
        tools=list(parsed.tools.echo),
        top_p=1.0 if request.top_p is None else request.top_p,
        user=request.user,
    )
