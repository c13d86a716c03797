# SPDX-License-Identifier: Apache-2.0
"""The Messages API with Anthropic's official client: answers, streams, tools and reasoning."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import pytest

ARGUMENTS = '{"city": "Köln"}'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "Tells.", "input_schema": CITY}
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWER = f"<think>\nü?\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
USER: Any = {"role": "user", "content": "Hi"}
CACHED: Any = {"type": "ephemeral"}
FULL = [("thinking", "ü?"), ("text", "Let me see."), ("tool_use", {"city": "Köln"})]
FULL = [*FULL, FULL[-1]]

Model = Callable[..., Any]
Client = Callable[..., anthropic.AsyncAnthropic]


async def create(client: anthropic.AsyncAnthropic, **options: Any) -> anthropic.types.Message:
    options = {"model": "demo", "messages": [USER], "max_tokens": 500, **options}
    message: anthropic.types.Message = await client.messages.create(**options)
    return message


def shape(content: list[Any]) -> list[tuple[str, Any]]:
    """Return the type and the text or input of each block."""
    fields = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    return [(block.type, getattr(block, fields[block.type])) for block in content]


def kinds_of(events: list[Any]) -> list[str]:
    """Return the types of events; consecutive deltas of one type count once."""
    kinds: list[str] = []
    for event in events:
        delta = event["type"] == "content_block_delta"
        kind = event["delta"]["type"] if delta else event["type"]
        if not delta or kind != kinds[-1]:
            kinds.append(kind)
    return kinds


async def raw_events(gateway: Any, client: Client, **options: Any) -> list[Any]:
    """Return the data of all events of a stream; each has the name that its `type` says."""
    body = {"model": "demo", "messages": [USER], "max_tokens": 500, "stream": True, **options}
    http = client(gateway)._client
    response = await http.post(f"{gateway.url}/v1/messages", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_text_is_one_block(live: Any, model: Model, client: Client, prompt_of: Any) -> None:
    engine = model("Yes.", cached_tokens=4)
    message = await create(
        client(await live(engine)),
        system=[
            {"type": "text", "text": "Be brief.", "cache_control": CACHED},
            {"type": "text", "text": "OK?"},
        ],
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7},
        stop_sequences=["never"],
        metadata={"user_id": "u1"},
        service_tier="auto",
    )
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "demo")
    assert shape(message.content) == [("text", "Yes.")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    prompt_tokens = len(engine.requests[0].prompt) // 4
    assert message.usage.input_tokens == prompt_tokens - 4
    assert message.usage.cache_read_input_tokens == 4
    assert message.usage.cache_creation_input_tokens == 0
    assert message.usage.output_tokens == len(engine.does.reply)
    assert prompt_of(engine).startswith(
        "<|im_start|>system\nBe brief.\nOK?<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert sampling.max_tokens == 500


async def test_reasoning_text_and_calls_are_separate_blocks(live: Any, model: Model, client: Client) -> None:
    engine = model(ANSWER)
    message = await create(client(await live(engine)), tools=[WEATHER])
    assert shape(message.content) == FULL
    assert message.stop_reason == "tool_use"
    calls = [block for block in message.content if block.type == "tool_use"]
    assert {call.name for call in calls} == {"weather"}
    assert len({call.id for call in calls}) == 2
    assert message.content[0].type == "thinking"
    assert message.content[0].signature
    reasoning = engine.tokenizer.encode("<think>\nü?\n</think>", add_special_tokens=False)
    details = message.usage.output_tokens_details
    assert details is not None
    assert details.thinking_tokens == len(reasoning)


@pytest.mark.parametrize("tokens_a_step", [1, 7, 200])
async def test_stream_events_are_in_order(
    live: Any, model: Model, client: Client, tokens_a_step: int
) -> None:
    engine = model(ANSWER, tokens_a_step=tokens_a_step, cached_tokens=2)
    events = await raw_events(await live(engine), client, tools=[WEATHER])
    call = ["content_block_start", "input_json_delta", "content_block_stop"]
    assert kinds_of(events) == [
        "message_start",
        "ping",
        *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop"),
        *call,
        *call,
        "message_delta",
        "message_stop",
    ]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2, 3]
    assert starts[2]["content_block"]["input"] == {}
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert stops == [0, 1, 2, 3]
    prompt_tokens = len(engine.requests[0].prompt) // 4
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == prompt_tokens
    last = events[-2]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["input_tokens"] == prompt_tokens - 2
    assert last["usage"]["cache_read_input_tokens"] == 2
    assert last["usage"]["output_tokens"] == len(engine.does.reply)


async def test_the_official_client_assembles_the_stream(live: Any, model: Model, client: Client) -> None:
    gateway = await live(model(ANSWER, tokens_a_step=3))
    async with client(gateway).messages.stream(
        model="demo", messages=[USER], max_tokens=500, tools=[WEATHER]
    ) as stream:
        message = await stream.get_final_message()
    full = await create(client(gateway), tools=[WEATHER])
    assert shape(message.content) == shape(full.content) == FULL
    assert message.stop_reason == full.stop_reason == "tool_use"
    assert message.usage.output_tokens == full.usage.output_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequence_is_named(live: Any, model: Model, client: Client, stream: bool) -> None:
    gateway = await live(model("One two three."))
    for tools in ([], [WEATHER]):
        options = {"stop_sequences": ["four", " thr"], "tools": tools}
        if stream:
            events = await raw_events(gateway, client, **options)
            texts = [event["delta"] for event in events if event["type"] == "content_block_delta"]
            text = "".join(delta["text"] for delta in texts)
            reason = events[-2]["delta"]
        else:
            message = await create(client(gateway), **options)
            text = message.content[0].text  # type: ignore[union-attr]
            reason = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        assert text == "One two"
        assert reason == {"stop_reason": "stop_sequence", "stop_sequence": " thr"}


async def test_the_end_of_tokens_and_of_the_context_differ(live: Any, model: Model, client: Client) -> None:
    engine = model("One two three.", end=None)
    gateway = await live(engine)
    tokens = len(engine.does.reply)
    message = await create(client(gateway), max_tokens=tokens)
    assert message.stop_reason == "max_tokens"
    message = await create(client(gateway), max_tokens=1_000_000)  # more than the context of 2,048 holds
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.input_tokens + message.usage.output_tokens == 2048


async def test_an_answer_without_content_has_no_blocks(live: Any, model: Model, client: Client) -> None:
    gateway = await live(model(""))
    message = await create(client(gateway))
    assert (message.content, message.stop_reason) == ([], "end_turn")
    kinds = kinds_of(await raw_events(gateway, client))
    assert kinds == ["message_start", "ping", "message_delta", "message_stop"]


async def test_a_call_cut_off_within_its_arguments_has_no_input(
    live: Any, model: Model, client: Client
) -> None:
    cut = CALL.partition("Kö")[0]
    engine = model(cut, end=None)
    tokens = len(engine.does.reply) - 1  # without the end token
    message = await create(client(await live(engine)), tools=[WEATHER], max_tokens=tokens)
    assert shape(message.content) == [("tool_use", {})]
    assert message.stop_reason == "max_tokens"


async def test_tool_loop_reaches_the_template(
    live: Any, model: Model, client: Client, prompt_of: Any
) -> None:
    engine = model(ANSWER)
    gateway = await live(engine)
    first = await create(client(gateway), tools=[WEATHER])
    calls = [block for block in first.content if block.type == "tool_use"]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "Rain", "cache_control": CACHED},
        {
            "type": "tool_result",
            "tool_use_id": calls[1].id,
            "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "station"}],
            "is_error": True,
        },
        {"type": "text", "text": "And now?"},
    ]
    answer = [block.to_dict() for block in first.content]
    redacted = {"type": "redacted_thinking", "data": "c2VjcmV0"}
    messages = [
        USER,
        {"role": "assistant", "content": [redacted, *answer]},
        {"role": "user", "content": results},
    ]
    await create(client(gateway), tools=[{**WEATHER, "type": "custom"}], messages=messages)
    prompt = prompt_of(engine)
    assert '"name": "weather", "description": "Tells."' in prompt
    assert prompt.count(CALL) == 2
    assert (
        "<tool_response>\nRain\n</tool_response>\n<tool_response>\nError: no\nstation\n</tool_response>"
        in (prompt)
    )
    assert prompt.endswith("<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n")
    assert "c2VjcmV0" not in prompt


async def test_thinking_blocks_after_the_question_reach_the_template(
    live: Any, model: Model, client: Client, prompt_of: Any
) -> None:
    engine = model(ANSWER)
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}}
    thought = {"type": "thinking", "thinking": "rain, maybe", "signature": "x"}
    result = {"type": "tool_result", "tool_use_id": "t1"}
    messages = [USER, {"role": "assistant", "content": [thought, use]}, {"role": "user", "content": [result]}]
    await create(client(await live(engine)), tools=[WEATHER], messages=messages)
    assert "<think>\nrain, maybe\n</think>" in prompt_of(engine)
    assert "<tool_response>\n\n</tool_response>" in prompt_of(engine)


async def test_thinking_switches_the_template(
    live: Any, model: Model, client: Client, prompt_of: Any
) -> None:
    engine = model("Yes.")
    connected = client(await live(engine))
    off = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    for thinking, ends_with_off in (
        ({"type": "disabled"}, True),
        ({"type": "enabled", "budget_tokens": 1024}, False),
        ({"type": "adaptive"}, False),
    ):
        await create(connected, thinking=thinking)
        assert prompt_of(engine).endswith(off) is ends_with_off, thinking


async def test_consecutive_messages_of_a_role_become_one(
    live: Any, model: Model, client: Client, prompt_of: Any
) -> None:
    engine = model("Yes.")
    parts = {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}
    said = [{"role": "assistant", "content": "x"}, {"role": "assistant", "content": []}]
    await create(client(await live(engine)), messages=[{"role": "user", "content": "a"}, parts, *said, USER])
    assert prompt_of(engine).startswith(
        "<|im_start|>user\na\nb\nc<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n<|im_start|>user\nHi"
    )


async def test_the_answer_continues_the_assistants_text(
    live: Any, model: Model, client: Client, prompt_of: Any
) -> None:
    engine = model(" two")
    message = await create(
        client(await live(engine)), messages=[USER, {"role": "assistant", "content": "One,"}]
    )
    assert prompt_of(engine).endswith("One,")
    assert shape(message.content) == [("text", " two")]


async def test_tool_choices_constrain_the_answer(
    live: Any, model: Model, client: Client, prompt_of: Any
) -> None:
    engine = model(CALL)
    connected = client(await live(engine))
    other = {**WEATHER, "name": "news"}
    for choice, names in (
        ({"type": "any"}, {"weather", "news"}),
        ({"type": "tool", "name": "news"}, {"news"}),
    ):
        await create(connected, tools=[WEATHER, other], tool_choice=choice)
        grammar = engine.requests[-1].sampling.grammar
        assert {name for name in ("weather", "news") if name in grammar[1]} == names, choice
    await create(connected, tools=[WEATHER], tool_choice={"type": "auto"})
    assert engine.requests[-1].sampling.grammar is None
    await create(connected, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert engine.requests[-1].sampling.grammar is not None
    await create(connected, tools=[WEATHER], tool_choice={"type": "none"})
    assert "weather" not in prompt_of(engine)


async def test_output_format_constrains_the_answer(live: Any, model: Model, client: Client) -> None:
    engine = model('{"city": "a"}')
    options: Any = {"output_config": {"format": {"type": "json_schema", "schema": CITY}}}
    await create(client(await live(engine)), **options)
    grammar = engine.requests[-1].sampling.grammar
    assert '"city"' in grammar[1]


async def test_tools_of_anthropic_are_left_out_and_named(
    live: Any, model: Model, client: Client, prompt_of: Any
) -> None:
    engine = model("Yes.")
    connected = client(await live(engine))
    search: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}
    answer = await connected.messages.with_raw_response.create(
        model="demo", messages=[USER], max_tokens=5, tools=[search, WEATHER], extra_body={"made_up": 1}
    )
    assert answer.headers["x-mizzen-ignored"] == "made_up, tools[web_search_20250305]"
    assert "weather" in prompt_of(engine)
    assert "web_search" not in prompt_of(engine)
