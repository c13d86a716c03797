# SPDX-License-Identifier: Apache-2.0
"""The routing table: which engines serve, and the reported reasons why others do not."""

from __future__ import annotations

import asyncio
from typing import Any

from chat_requests import text_of
from mizzen.wire.messages import RefusalCode


async def test_missing_engine_files_are_fetched_again(live: Any, scripted: Any) -> None:
    engine = scripted()
    engine.does.ignored_file_requests = 1
    gateway = await live(engine, wait=False, engine_timeout_seconds=0.5)
    await gateway.serving(1)
    assert engine.hellos == 1


async def test_draining_engine_finishes_its_requests_and_gets_no_new_ones(
    live: Any, scripted: Any, until: Any
) -> None:
    old, new = scripted(), scripted()
    old.does.step_seconds = 0.02
    gateway = await live(old, new)
    client = gateway.client()
    tasks = [asyncio.create_task(text_of(client, max_tokens=1500)) for _ in range(8)]
    new.does.tokens_a_step = 100
    await until(lambda: len(old.requests) + len(new.requests) == 8 and old.running)
    old.does.draining = True
    await until(lambda: any(engine.state == "draining" for engine in gateway.gateway.table))
    before, old.does.tokens_a_step = len(old.requests), 100
    tasks += [asyncio.create_task(text_of(client, max_tokens=3)) for _ in range(8)]
    assert {reason for _, reason in await asyncio.gather(*tasks)} == {"length"}
    assert len(old.requests) == before


async def test_unusable_engines_are_ignored_and_reported(
    live: Any, scripted: Any, until: Any, tokenizer_files: dict[str, bytes]
) -> None:
    nameless = {**tokenizer_files, "tokenizer_config.json": b'{"chat_template": [{"name": "default"}]}'}
    foreign, broken, good = scripted(protocol=99), scripted({"tokenizer.json": b"{"}), scripted()
    gateway = await live(foreign, broken, scripted(nameless), good, wait=False)
    await until(lambda: sorted(e.state for e in gateway.gateway.table) == ["broken"] * 3 + ["serving"])
    problems = {engine.problem for engine in gateway.gateway.table}
    assert any("version 99 of the wire protocol" in problem for problem in problems), problems
    assert any("tokenizer.json" in problem for problem in problems)
    assert (await text_of(gateway.client(), max_tokens=2))[1] == "length"


async def test_invalid_hello_refusal_is_a_protocol_mismatch(live: Any, scripted: Any, until: Any) -> None:
    codes = (RefusalCode.INVALID, RefusalCode.QUEUE_FULL, RefusalCode.STARTING)
    engines = [scripted() for _ in codes]
    for engine, code in zip(engines, codes, strict=True):
        engine.does.refuse_hello = code
    gateway = await live(*engines, wait=False)
    await until(lambda: all(engine.state == "broken" for engine in gateway.gateway.table))
    assert [engine.other_protocol for engine in gateway.gateway.table] == [True, False, False]
    engines[0].does.refuse_hello = None  # the pod now runs an engine with the gateway's protocol
    await until(lambda: any(engine.serving for engine in gateway.gateway.table))
    assert not any(engine.other_protocol for engine in gateway.gateway.table)
