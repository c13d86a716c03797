# SPDX-License-Identifier: Apache-2.0
"""The load of an engine includes each of this gateway's requests until the request's last token."""

from __future__ import annotations

from typing import Any

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


async def test_stream_counts_as_load_until_its_last_token(live: Any, scripted: Any, until: Any) -> None:
    """A stream still counts after its first token, and after the engine has reported its own load."""
    engine = scripted()
    engine.does.step_seconds, engine.does.tokens_a_step = 0.05, 1
    gateway = await live(engine)
    [table_engine] = gateway.gateway.table
    stream = await gateway.client().chat.completions.create(**CHAT, stream=True, max_tokens=60)
    counted: list[tuple[int, bool]] = []
    reports: set[int] = set()
    async for _ in stream:
        if engine.running:
            counted.append((table_engine.requests, table_engine.load > 0))
            reports.add(id(table_engine.link.stats))
    assert len(counted) > 20 and set(counted) == {(1, True)}
    assert len(reports) > 1, "the engine has reported meanwhile"
    await until(lambda: table_engine.requests == 0)
    assert table_engine.tokens_in_flight == 0
