# SPDX-License-Identifier: Apache-2.0
"""Streamed tool calls as clients with little code read them: one kind of output per event.

Many clients read only `tool_calls[0]` of an event, or only one of reasoning, content and tool calls.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen.core.sampling_params import SamplingParams
from mizzen.gateway.openai.response_writers import ChatWriter
from mizzen.gateway.requests.answer import AnswerPiece, join_deltas, join_pieces
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.output import OutputDelta, ToolCallDelta
from slow_readers import read_stream, request_unread
from tool_chats import ANSWERS, ARGUMENTS, TOOLS, USER, Model, chat

THOUGHT = "<think>\nHm.\n</think>\n\n"
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'


def read_one_kind(deltas: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str]]]:
    """Read deltas like a client that expects one kind of output in each, and one tool call.

    Such a client ignores the arguments in the first delta of a call. Return reasoning, content and calls.
    """
    reasoning, content, calls = "", "", []
    for delta in deltas:
        if delta.get("reasoning_content"):
            reasoning += delta["reasoning_content"]
        elif delta.get("content"):
            content += delta["content"]
        elif delta.get("tool_calls"):
            call = delta["tool_calls"][0]
            if call.get("id"):
                calls.append([call["function"]["name"], ""])
            else:
                calls[call["index"]][1] += call["function"]["arguments"]
    return reasoning, content, [(name, arguments) for name, arguments in calls]


def read_events(events: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str]]]:
    return read_one_kind([choice["delta"] for event in events for choice in event["choices"]])


@pytest.mark.parametrize("tokens_a_step", [1, 3, 200])
@pytest.mark.parametrize("template", ["qwen3", "llama31", "mistral_tools"])
async def test_clients_that_read_the_first_call_of_an_event_get_whole_calls(
    live: Any, model: Model, template: str, tokens_a_step: int
) -> None:
    """The engine may deliver the beginnings of several calls together."""
    answer = THOUGHT + "Let me see.\n" + CALL * 3 if template == "qwen3" else ANSWERS[template]
    engine = model(template, answer)
    engine.does.tokens_a_step = tokens_a_step
    gateway = await live(engine)
    stream = await gateway.client().chat.completions.create(
        model="demo", messages=USER, tools=TOOLS, stream=True
    )
    deltas = [choice.delta.model_dump() async for chunk in stream for choice in chunk.choices]
    assert all(len(delta["tool_calls"] or ()) <= 1 for delta in deltas)
    expected = await chat(gateway, False, tools=TOOLS)
    assert expected["tool_calls"] == [("weather", ARGUMENTS)] * (3 if template == "qwen3" else 1)
    reasoning, content, calls = read_one_kind(deltas)
    assert calls == expected["tool_calls"]
    assert content == (expected.get("content") or "")
    assert reasoning == expected.get("reasoning_content", "")


async def test_slow_readers_get_whole_calls(live: Any, model: Model, until: Any) -> None:
    """Output that a slow client has not read is joined; each event still has part of one call only."""
    arguments = [json.dumps({"city": f"{number} {'Köln' * 200}"}, ensure_ascii=False) for number in range(60)]
    calls = [f'<tool_call>\n{{"name": "weather", "arguments": {each}}}\n</tool_call>\n' for each in arguments]
    engine = model("qwen3", THOUGHT + "Let me see.\n" + "".join(calls))
    engine.does.tokens_a_step = 100
    engine._welcome["context_length"] = 200_000
    gateway = await live(engine)
    body = {"model": "demo", "messages": USER, "tools": TOOLS, "stream": True}
    client = request_unread(gateway, "/v1/chat/completions", body)
    try:
        await until(lambda: engine.requests and not engine.running and not gateway.gateway.in_flight)
        events = await read_stream(client)
    finally:
        client.close()
    reasoning, content, streamed = read_events(events)
    assert (reasoning, content) == ("Hm.", "Let me see.")
    assert streamed == [("weather", each) for each in arguments]


WORDS = st.text("ab{", min_size=1, max_size=3)


@st.composite
def output_deltas(draw: st.DrawFn) -> list[OutputDelta]:
    """Draw the deltas of an answer: reasoning, then content, then calls, several of them per delta."""
    deltas = [OutputDelta(reasoning=text) for text in draw(st.lists(WORDS, max_size=2))]
    deltas += [OutputDelta(content=text) for text in draw(st.lists(WORDS, max_size=2))]
    parts: list[ToolCallDelta] = []
    for index, arguments in enumerate(draw(st.lists(st.lists(WORDS, max_size=3), max_size=3))):
        parts.append(ToolCallDelta(index, f"call_{index}", f"tool{index}"))
        parts += [ToolCallDelta(index, arguments=text) for text in arguments]
    while parts:
        size = draw(st.integers(1, 4))
        deltas.append(OutputDelta(tool_calls=tuple(parts[:size])))
        parts = parts[size:]
    return deltas


@given(output_deltas(), st.data())
def test_events_are_complete_however_pieces_are_joined(
    deltas: list[OutputDelta], data: st.DataObject
) -> None:
    """Deltas are joined when tokens arrive together, and pieces when a client is slow."""
    pieces: list[AnswerPiece] = []
    rest = list(deltas)
    while rest:
        size = data.draw(st.integers(1, 3))
        joined = OutputDelta()
        for delta in rest[:size]:
            joined = join_deltas(joined, delta)
        pieces.append(AnswerPiece(joined, []))
        rest = rest[size:]
    if len(pieces) > 1 and data.draw(st.booleans()):
        pieces = [join_pieces(pieces[:2]), *pieces[2:]]
    writer = ChatWriter(GenerationRequest(model="m", sampling=SamplingParams(), stream=True))
    stream = b"".join(writer.write_piece(0, piece, None) for piece in pieces)
    lines = [line for line in stream.split(b"\n\n") if line]
    reasoning, content, calls = read_events([json.loads(line.removeprefix(b"data: ")) for line in lines])
    assert reasoning == "".join(delta.reasoning for delta in deltas)
    assert content == "".join(delta.content for delta in deltas)
    arguments: dict[int, str] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
    assert calls == [(f"tool{index}", text) for index, text in arguments.items()]
