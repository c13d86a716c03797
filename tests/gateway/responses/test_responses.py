# SPDX-License-Identifier: Apache-2.0
"""The Responses API with the official OpenAI client: input items, output items and stream events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.types.responses import Response

from mizzen.gateway.responses.parse import RENAMED_FIELDS

END = "<|im_end|>"
ARGUMENTS = '{"city": "Köln"}'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "description": "Tells.", "parameters": CITY}
TOOLS: list[Any] = [{**WEATHER, "strict": False}]
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWER = f"<think>\nü?\n</think>\n\nLet me see.\n{CALL}\n{CALL}"

Model = Callable[..., Any]


def request_prompt(engine: Any) -> str:
    ids = np.frombuffer(engine.requests[-1].prompt, "<i4").tolist()
    return engine.tokenizer.decode(ids, skip_special_tokens=False)


async def create(gateway: Any, **options: Any) -> Response:
    return await gateway.client().responses.create(model="demo", **{"input": "Hi", **options})


async def stream_events(gateway: Any, **options: Any) -> list[Any]:
    stream = await create(gateway, stream=True, **options)
    return [event async for event in stream]  # type: ignore[attr-defined]


def shape(items: list[Any]) -> list[tuple[str, str, str]]:
    """Return the type, status and text of each item."""
    shapes = []
    for item in items:
        text = item.arguments if item.type == "function_call" else item.content[0].text
        shapes.append((item.type, item.status, text))
    return shapes


FULL = [
    ("reasoning", "completed", "ü?"),
    ("message", "completed", "Let me see."),
    ("function_call", "completed", ARGUMENTS),
    ("function_call", "completed", ARGUMENTS),
]


async def test_text_is_one_message_item(live: Any, model: Model) -> None:
    engine = model("Yes.", cached_tokens=4)
    gateway = await live(engine)
    response = await create(
        gateway,
        instructions="Be brief.",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=50,
        metadata={"a": "b"},
        store=False,
        extra_body={"top_k": 7, "seed": 3},
    )
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.error) == ("response", "completed", None)
    assert response.output_text == "Yes."
    assert shape(response.output) == [("message", "completed", "Yes.")]
    assert (response.instructions, response.metadata, response.max_output_tokens) == (
        "Be brief.",
        {"a": "b"},
        50,
    )
    assert (response.temperature, response.top_p, response.tool_choice) == (0.5, 0.9, "auto")
    assert (response.model_extra or {})["store"] is False
    usage = response.usage
    assert usage is not None
    assert usage.input_tokens == len(engine.requests[0].prompt) // 4
    assert usage.output_tokens == len(engine.does.reply)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 4
    assert request_prompt(engine).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.top_k, sampling.seed) == (
        0.5,
        0.9,
        50,
        7,
        3,
    )


async def test_reasoning_text_and_calls_are_separate_items(live: Any, model: Model) -> None:
    engine = model(ANSWER)
    gateway = await live(engine)
    response = await create(gateway, tools=TOOLS)
    assert shape(response.output) == FULL
    calls = [item for item in response.output if item.type == "function_call"]
    assert {call.name for call in calls} == {"weather"}
    assert all(call.call_id.startswith("call_") for call in calls)
    assert len({item.id for item in response.output}) == 4
    assert [item.id.split("_")[0] for item in response.output] == ["rs", "msg", "fc", "fc"]
    assert response.usage is not None
    reasoning = engine.tokenizer.encode("<think>\nü?\n</think>", add_special_tokens=False)
    assert response.usage.output_tokens_details.reasoning_tokens == len(reasoning)
    assert response.tools[0].to_dict() == TOOLS[0]


@pytest.mark.parametrize("tokens_a_step", [1, 7, 200])
async def test_stream_events_are_in_order(live: Any, model: Model, tokens_a_step: int) -> None:
    gateway = await live(model(ANSWER, tokens_a_step=tokens_a_step))
    events = await stream_events(gateway, tools=TOOLS)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds: list[str] = []
    for event in events:
        kind = event.type.removeprefix("response.")
        if not kinds or kind != kinds[-1] or not kind.endswith("delta"):
            kinds.append(kind)
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]

    def text(name: str) -> list[str]:
        parts = [f"{name}.delta", f"{name}.done"]
        return ["output_item.added", "content_part.added", *parts, "content_part.done", "output_item.done"]

    assert kinds == [
        "created",
        "in_progress",
        *text("reasoning_text"),
        *text("output_text"),
        *call,
        *call,
        "completed",
    ]
    last = events[-1].response
    assert shape(last.output) == FULL
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    assert last.usage is not None
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == "Let me see."
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in last.output]
    indices = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert indices == [0, 1, 2, 3]


async def test_client_builds_the_final_response_from_stream_events(live: Any, model: Model) -> None:
    gateway = await live(model(ANSWER))
    async with gateway.client().responses.stream(model="demo", input="Hi", tools=TOOLS) as stream:
        async for _ in stream:
            pass
        response = await stream.get_final_response()
    assert shape(response.output) == FULL
    assert response.output_text == "Let me see."


async def test_stream_with_invisible_last_tokens_ends_complete(live: Any, model: Model) -> None:
    """No unread bytes may remain on the connection, because the client reuses it for the next request."""
    engine = model("<think>\n\n</think>")
    gateway = await live(engine)
    body = {"model": "demo", "input": "Hi", "stream": True}
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=1), timeout=60) as client:
        for _ in range(3):
            answer = await client.post(f"{gateway.url}/v1/responses", json=body)
            names = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
            assert names[-1] == "response.completed", names


@pytest.mark.parametrize("stream", [False, True])
async def test_truncated_answer_is_incomplete(live: Any, model: Model, stream: bool) -> None:
    gateway = await live(model("one two three four five six seven eight"))
    if stream:
        events = await stream_events(gateway, max_output_tokens=3)
        assert events[-1].type == "response.incomplete"
        response = events[-1].response
    else:
        response = await create(gateway, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_do_not_cut_calls(live: Any, model: Model, stream: bool) -> None:
    """Stop strings are not applied inside a call; a call that the model leaves open is incomplete."""
    gateway = await live(model(ANSWER))
    broken = await live(model(ANSWER.rpartition('"}')[0]))

    async def output(of: Any, stop: str) -> list[tuple[str, str, str]]:
        options: dict[str, Any] = {"tools": TOOLS, "extra_body": {"stop": [stop]}}
        if stream:
            return shape((await stream_events(of, **options))[-1].response.output)
        return shape((await create(of, **options)).output)

    assert await output(gateway, "Köln") == FULL
    assert await output(gateway, " me") == [FULL[0], ("message", "completed", "Let")]
    cut = ("function_call", "incomplete", ARGUMENTS.partition('"}')[0])
    assert await output(broken, "Köln") == [*FULL[:3], cut]


async def test_items_become_the_conversation(live: Any, model: Model) -> None:
    """A client can send output items back; consecutive reasoning, text and calls become one message."""
    engine = model(ANSWER)
    gateway = await live(engine)
    first = await create(gateway, tools=TOOLS)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "12 °C"}
        for item in first.output
        if item.type == "function_call"
    ]
    items: list[Any] = [
        {"role": "developer", "content": "Speak plainly."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        *[item.model_dump() for item in first.output],
        *outputs,
        {"type": "message", "role": "user", "content": "And now?"},
    ]
    await create(gateway, input=items, instructions="Be brief.", tools=TOOLS)
    prompt = request_prompt(engine)
    assert "<|im_start|>system\nBe brief.\n\nSpeak plainly." in prompt
    call = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
    assert f"<|im_start|>assistant\nLet me see.\n{call}\n{call}<|im_end|>" in prompt
    response = "\n<tool_response>\n12 °C\n</tool_response>"
    assert f"<|im_start|>user{response}{response}<|im_end|>" in prompt
    assert prompt.endswith("<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n")
    items = [{"role": "user", "content": "Hi"}, *first.output, *outputs]
    await create(gateway, input=items, tools=TOOLS)
    assert "<think>\nü?\n</think>\n\nLet me see.\n<tool_call>" in request_prompt(engine)


async def test_tool_choice_and_format_reach_the_engine(live: Any, model: Model) -> None:
    engine = model(CALL)
    gateway = await live(engine, reasoning_parser="none")
    response = await create(gateway, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert shape(response.output) == FULL[-1:]
    assert response.parallel_tool_calls is False
    kind, text = engine.requests[-1].sampling.grammar
    assert (kind, json.loads(text)["format"]["stop_after_first"]) == ("structural_tag", True)
    named = {"type": "function", "name": "weather"}
    response = await create(gateway, tools=TOOLS, tool_choice=named)
    assert response.tool_choice.to_dict() == named  # type: ignore[union-attr]
    assert engine.requests[-1].sampling.grammar is not None
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    await create(gateway, tools=TOOLS, tool_choice=allowed)
    assert engine.requests[-1].sampling.grammar is not None
    await create(gateway, tools=TOOLS, tool_choice="none")
    assert "weather" not in request_prompt(engine)
    form = {"format": {"type": "json_schema", "name": "x", "schema": CITY, "strict": True}}
    response = await create(gateway, text=form)
    kind, text = engine.requests[-1].sampling.grammar
    assert (kind, json.loads(text)) == ("json_schema", CITY)
    assert response.text.format.to_dict() == form["format"]  # type: ignore[union-attr]
    await create(gateway, text={"format": {"type": "json_object"}})
    assert engine.requests[-1].sampling.grammar[0] == "json_object"
    await create(gateway, reasoning={"effort": "none"}, include=["reasoning.encrypted_content"])
    assert request_prompt(engine).endswith("<think>\n\n</think>\n\n")


async def test_broken_stream_ends_with_response_failed(live: Any, model: Model) -> None:
    engine = model("one two three four", fault="error", fault_after=2)
    gateway = await live(engine, max_resumes=0)
    events = await stream_events(gateway)
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert "out of memory" in events[-1].response.error.message
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_synchronous_client_works_with_responses(live: Any, model: Model) -> None:
    gateway = await live(model("Yes."))

    def ask() -> str:
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0)
        return client.responses.create(model="demo", input="Hi").output_text

    assert await asyncio.to_thread(ask) == "Yes."


def input_of(**item: Any) -> dict[str, Any]:
    return {"input": [item]}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


SCHEMA = "text.format.schema"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"conversation": {}}, "conversation"),
    ({"previous_response_id": ""}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 100_000}, "input"),
    ({"temperature": 3}, "temperature"),
    ({"messages": []}, "messages"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"stream_options": {}}, "stream_options"),
    (input_of(type="item_reference", id="msg_1"), "input[0].type"),
    (input_of(type="web_search_call"), "input[0].type"),
    (input_of(role="tool", content="x"), "input[0].role"),
    (input_of(role="user"), "input[0].content"),
    (input_of(role="user", content=[{"type": "input_image", "image_url": "x"}]), "input[0].content[0]"),
    (input_of(role="user", content=[{"type": "input_text"}]), "input[0].content[0].text"),
    (input_of(type="function_call", call_id="c", name="f"), "input[0].arguments"),
    (input_of(type="function_call_output", call_id="c", output="x"), "input[0].call_id"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": ["weather"]}, "tools[0]"),
    ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
    ({"tools": [{**WEATHER, "parameters": {"type": 1}}]}, "tools[0].parameters.type"),
    ({"tools": [{**WEATHER, "parameters": {"default": nested(200)}}]}, "tools[0].parameters"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"a": nested(200)}}}}, SCHEMA),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"title": "b" * 600_000}}}}, SCHEMA),
    (input_of(role="user", content=nested(700)), "input[0].content[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
]


async def test_unsupported_fields_are_named(live: Any, model: Model) -> None:
    gateway = await live(model("Yes."))
    async with httpx.AsyncClient(timeout=60) as http:
        for body, param in BAD:
            sent = {"model": "demo", "input": "Hi", **body}
            response = await http.post(f"{gateway.url}/v1/responses", json=sent)
            assert response.status_code == 400, (body, response.text)
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param), (body, error)
            for name in set(RENAMED_FIELDS) - set(body):  # fields of chat requests only
                assert not error["message"].startswith(name), error
        sent = {"model": "demo", "input": "Hi", "previous_response_id": "x"}
        error = (await http.post(f"{gateway.url}/v1/responses", json=sent)).json()["error"]
        assert "in input" in error["message"]
        unknown = await http.post(f"{gateway.url}/v1/responses", json={"model": "other", "input": "Hi"})
        assert unknown.status_code == 404
