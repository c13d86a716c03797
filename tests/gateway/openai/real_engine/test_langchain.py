# SPDX-License-Identifier: Apache-2.0
"""LangChain against a gateway with the demo model: streamed tool calls, typed answers, second turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

pytestmark = pytest.mark.xdist_group("demo-engine")


class Fact(BaseModel):
    """Name a fact."""

    word: Literal["mast", "hull"]


@tool
def look_up(word: Literal["mast", "hull"]) -> str:
    """Look a word up."""
    return f"A {word} is part of a ship."


@pytest.mark.parametrize("responses", [False, True])
async def test_langchain_sums_a_streamed_call_and_continues(
    live_demo: Callable[..., Any], responses: bool
) -> None:
    """Programs often add chunks from the first chunk with a call on, which must therefore hold its name."""
    gateway = await live_demo(tool_parser="hermes")
    model = ChatOpenAI(
        model="demo", base_url=f"{gateway.url}/v1", api_key=SecretStr("none"), max_retries=0,
        temperature=0, use_responses_api=responses, store=True,
    )  # fmt: skip
    caller: Any = model.bind_tools([look_up], tool_choice="look_up", max_tokens=400)
    question = HumanMessage("What is a mast?")
    chunks = [chunk async for chunk in caller.astream([question])]
    first = next(
        i for i, chunk in enumerate(chunks) if isinstance(chunk, AIMessageChunk) and chunk.tool_call_chunks
    )
    called: Any = reduce(add, chunks[first:])
    assert [call["name"] for call in called.tool_calls] == ["look_up"]
    assert called.tool_calls[0]["args"] in ({"word": "mast"}, {"word": "hull"})
    result = await look_up.ainvoke(called.tool_calls[0])
    assert isinstance(result, ToolMessage)
    typed = model.with_structured_output(Fact, method="json_schema")
    answer = await typed.ainvoke([question, reduce(add, chunks), result, HumanMessage("Go on.")])
    assert isinstance(answer, Fact)
    more = await caller.ainvoke([question, called, result, HumanMessage("And now?")])
    assert [call["name"] for call in more.tool_calls] == ["look_up"]
