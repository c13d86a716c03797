# SPDX-License-Identifier: Apache-2.0
"""The Responses API and the Messages API with a model whose answers have harmony format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import pytest

from tool_chats import ARGUMENTS, CITY, request_grammar, request_prompt

Model = Callable[..., Any]

TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": CITY, "strict": False}
HEAD = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
PREAMBLE = f"{HEAD}<|channel|>commentary<|message|>I look.<|end|>"
MORE = f"{HEAD}<|channel|>analysis<|message|>So.<|end|>"
CALL = f"{HEAD}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
FINAL = f"{HEAD}<|channel|>final<|message|>Rain.<|return|>"


def reply(engine: Any, text: str) -> None:
    """Make the engine answer with a text, which ends with an end token."""
    engine.does.reply = engine.tokenizer.encode(text, add_special_tokens=False)
    engine.does.end = engine.does.reply[-1]


async def ask(gateway: Any, stream: bool, **options: Any) -> Any:
    client = gateway.client().responses
    if not stream:
        return await client.create(model="demo", tools=[TOOL], **options)
    events = [
        event async for event in await client.create(model="demo", tools=[TOOL], stream=True, **options)
    ]
    return events[-1].response


def texts(items: list[Any]) -> list[tuple[str, str]]:
    return [
        (item.type, item.arguments if item.type == "function_call" else item.content[0].text)
        for item in items
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_conversation_goes_on_after_a_call(live: Any, model: Model, stream: bool) -> None:
    """Stored items, and items that the client sends back, give the prompt that the format demands."""
    engine = model(THOUGHT + PREAMBLE + MORE + CALL)
    gateway = await live(engine, response_store_seconds=60)
    first = await ask(gateway, stream, input="Weather?", reasoning={"effort": "high"})
    assert texts(first.output) == (
        [("reasoning", "Hm."), ("message", "I look."), ("reasoning", "So."), ("function_call", ARGUMENTS)]
        if stream
        else [("reasoning", "Hm.\n\nSo."), ("message", "I look."), ("function_call", ARGUMENTS)]
    )
    assert "\nReasoning: high\n" in request_prompt(engine)
    tokens = engine.tokenizer.encode(THOUGHT + MORE, add_special_tokens=False)
    assert first.usage.output_tokens_details.reasoning_tokens == len(tokens)
    reply(engine, THOUGHT + FINAL)
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "12"}
    second = await ask(gateway, stream, input=[output], previous_response_id=first.id)
    assert texts(second.output) == [("reasoning", "Hm."), ("message", "Rain.")]
    continued = request_prompt(engine)
    assert continued[continued.index("<|start|>user") :] == (
        "<|start|>user<|message|>Weather?<|end|>"
        f"{HEAD}<|channel|>analysis<|message|>Hm.\n\nSo.<|end|>"
        f"{HEAD}<|channel|>commentary<|message|>I look.<|end|>"
        f"{HEAD} to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
        f'<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"12"<|end|>{HEAD}'
    )
    sent = [item.model_dump(exclude_none=True) for item in first.output]
    history: list[Any] = [{"role": "user", "content": "Weather?"}, *sent, output]
    await ask(gateway, stream, input=history, store=False)
    assert request_prompt(engine) == continued
    await ask(gateway, stream, input="And now?", previous_response_id=second.id)
    assert "analysis<|message|>" not in request_prompt(engine)


async def test_text_format_constrains_the_answer(live: Any, model: Model) -> None:
    engine = model(THOUGHT + FINAL)
    text = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
    await ask(await live(engine), False, input="Hi", text=text)
    calls, final = (request_grammar(engine) or {})["elements"][1]["elements"]
    assert "functions.weather" in str(calls)
    assert final["elements"][-1]["json_schema"] == CITY


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_have_thinking_text_and_tool_use(live: Any, model: Model, stream: bool) -> None:
    engine = model(THOUGHT + PREAMBLE + MORE + CALL)
    gateway = await live(engine)
    options: Any = {
        "model": "demo",
        "max_tokens": 500,
        "tools": [{"name": "weather", "input_schema": CITY}],
    }
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        if stream:
            async with client.messages.stream(messages=messages, **options) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(messages=messages, **options)
        kinds = {"thinking": "thinking", "text": "text", "tool_use": "input"}
        blocks = [(block.type, getattr(block, kinds[block.type])) for block in message.content]
        use = ("tool_use", {"city": "Köln"})
        assert blocks == (
            [("thinking", "Hm."), ("text", "I look."), ("thinking", "So."), use]
            if stream
            else [("thinking", "Hm.\n\nSo."), ("text", "I look."), use]
        )
        assert message.stop_reason == "tool_use"
        used = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "12"}
        sent = [block.model_dump() for block in message.content]
        messages += [{"role": "assistant", "content": sent}, {"role": "user", "content": [used]}]
        reply(engine, FINAL.removeprefix(HEAD))
        answered = await client.messages.create(messages=messages, **options)
    assert [(block.type, block.text) for block in answered.content] == [("text", "Rain.")]
    prompt = request_prompt(engine)
    assert prompt.count("<|channel|>analysis<|message|>") == 1
    assert "Hm." in prompt
    assert "commentary<|message|>I look.<|end|>" in prompt
