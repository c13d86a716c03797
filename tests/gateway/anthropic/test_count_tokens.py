# SPDX-License-Identifier: Apache-2.0
"""Counts of prompt tokens equal the usage of the same request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import pytest

USER: Any = {"role": "user", "content": "What is a mast?"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "input_schema": CITY}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "Rain"}

Model = Callable[..., Any]
Client = Callable[..., anthropic.AsyncAnthropic]

CASES: dict[str, dict[str, Any]] = {
    "text": {},
    "system": {"system": [{"type": "text", "text": "Be brief."}]},
    "tools": {"tools": [TOOL], "tool_choice": {"type": "any"}},
    "no tools": {"tools": [TOOL], "tool_choice": {"type": "none"}},
    "no thinking": {"thinking": {"type": "disabled"}},
    "continued": {"messages": [USER, {"role": "assistant", "content": "A mast is"}]},
    "tool loop": {
        "tools": [TOOL],
        "messages": [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}],
    },
}


@pytest.mark.parametrize("name", CASES)
async def test_count_equals_the_usage(live: Any, model: Model, client: Client, name: str) -> None:
    connected = client(await live(model("Yes.")))
    options = {"model": "demo", "messages": [USER], **CASES[name]}
    count = await connected.messages.count_tokens(**options)
    message = await connected.messages.create(max_tokens=5, **options)
    assert count.input_tokens == message.usage.input_tokens > 0


async def test_cached_tokens_are_part_of_the_count(live: Any, model: Model, client: Client) -> None:
    connected = client(await live(model("Yes.", cached_tokens=5)))
    count = await connected.messages.count_tokens(model="demo", messages=[USER])
    usage = (await connected.messages.create(model="demo", messages=[USER], max_tokens=5)).usage
    assert usage.cache_read_input_tokens == 5
    assert count.input_tokens == usage.input_tokens + 5


async def test_counting_needs_no_room_in_the_context(live: Any, model: Model, client: Client) -> None:
    engine = model("Yes.")
    connected = client(await live(engine))
    long: Any = {"role": "user", "content": "mast " * 4000}
    count = await connected.messages.count_tokens(model="demo", messages=[long])
    assert count.input_tokens > 2048
    assert not engine.requests
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        await connected.messages.create(model="demo", messages=[long], max_tokens=5)


async def test_errors_of_counts_name_the_field(live: Any, model: Model, client: Client) -> None:
    connected = client(await live(model("Yes.")))
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.input_schema\.type"):
        await connected.messages.count_tokens(
            model="demo", messages=[USER], tools=[{"name": "a", "input_schema": {"type": "array"}}]
        )
    with pytest.raises(anthropic.NotFoundError):
        await connected.messages.count_tokens(model="other", messages=[USER])
