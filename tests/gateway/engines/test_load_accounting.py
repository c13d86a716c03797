"""Load of an engine: every request of this gateway counts until its last token."""

from __future__ import annotations

from typing import Any

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


async def test_stream_counts_as_load_until_its_last_token(live: Any, scripted: Any, until: Any) -> None:
    """Neither its first token nor the engine's own reports end the count."""
    engine = scripted()
    engine.does.step_seconds, engine.does.tokens_a_step = 0.05, 1
    gateway = await live(engine)
    [one] = gateway.gateway.table
    stream = await gateway.client().chat.completions.create(**CHAT, stream=True, max_tokens=60)
    counted: list[tuple[int, bool]] = []
    reports: set[int] = set()
    async for _ in stream:
        if engine.running:
            counted.append((one.requests, one.load > 0))
            reports.add(id(one.link.stats))
    assert len(counted) > 20 and set(counted) == {(1, True)}
    assert len(reports) > 1, "the engine has reported meanwhile"
    await until(lambda: one.requests == 0)
    assert one.tokens_in_flight == 0
