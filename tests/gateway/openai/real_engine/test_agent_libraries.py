# SPDX-License-Identifier: Apache-2.0
"""Agent libraries against a gateway with the demo model: tools, typed answers, and their second turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import agents
import openai
import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

pytestmark = pytest.mark.xdist_group("demo-engine")

LIMITED: Any = {"max_tokens": 400, "temperature": 0}


class Fact(BaseModel):
    word: Literal["mast", "hull"]
    masts: Literal[1, 2, 3]


@agents.function_tool
def look_up(word: Literal["mast", "hull"]) -> str:
    """Look a word up."""
    return f"A {word} is part of a ship."


@pytest.fixture
async def client(live_demo: Callable[..., Any]) -> openai.AsyncOpenAI:
    gateway = await live_demo(tool_parser="hermes")
    return gateway.client().with_options(timeout=120)


@pytest.mark.parametrize("model_class", [OpenAIChatModel, OpenAIResponsesModel])
async def test_pydantic_ai_gets_typed_answers_in_two_turns(
    client: openai.AsyncOpenAI, model_class: Callable[..., Any]
) -> None:
    model = model_class("demo", provider=OpenAIProvider(openai_client=client))
    agent = Agent(model, output_type=Fact, model_settings=LIMITED)
    first = await agent.run("Name a fact.")
    second = await agent.run("Name another one.", message_history=first.all_messages())
    assert isinstance(first.output, Fact)
    assert isinstance(second.output, Fact)


@pytest.mark.parametrize("model_class", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
async def test_openai_agents_calls_a_tool_and_continues(
    client: openai.AsyncOpenAI, model_class: Callable[..., Any]
) -> None:
    agents.set_tracing_disabled(True)
    model = model_class("demo", client)
    settings = agents.ModelSettings(**LIMITED, tool_choice="look_up", verbosity="low", store=True)
    first = agents.Agent(name="first", model=model, tools=[look_up], model_settings=settings)
    result = await agents.Runner.run(first, "What is a mast?", max_turns=3)
    outputs = [item for item in result.new_items if isinstance(item, agents.ToolCallOutputItem)]
    assert len(outputs) == 1
    assert str(outputs[0].output).endswith("is part of a ship.")
    typed = agents.Agent(
        name="second", model=model, output_type=Fact, model_settings=agents.ModelSettings(**LIMITED)
    )
    answer = await agents.Runner.run(typed, [*result.to_input_list(), {"role": "user", "content": "Go on."}])
    assert isinstance(answer.final_output, Fact)
