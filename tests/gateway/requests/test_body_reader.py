# SPDX-License-Identifier: Apache-2.0
"""Large bodies are parsed in a thread; bodies whose parsing would hold the interpreter lock are rejected."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen.gateway.auth.api_keys import Grant
from mizzen.gateway.auth.authentication import TENANT_KEY
from mizzen.gateway.auth.tenant import Tenant
from mizzen.gateway.errors import ApiError
from mizzen.gateway.fields.decoder import BodyDecoder
from mizzen.gateway.openai.parse import RequestParser, parse_token_ids
from mizzen.gateway.requests.body_reader import PIECE_ITEMS, SMALL_BYTES, BodyReader, check_containers
from mizzen.gateway.requests.engine_request import prompt_array

VALUES = st.recursive(
    st.none() | st.text('[{"\\a', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('[{"\\', max_size=4), inner),
    max_leaves=12,
)
LONG = "x [1, 2] { " * (SMALL_BYTES // 10)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [1] * SMALL_BYTES},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": LONG},
    "/v1/embeddings": {"input": [[1] * SMALL_BYTES]},
    "/v1/score": {"query": [1] * SMALL_BYTES, "items": [[1]], "label_token_ids": [1]},
    "/tokenize": {"prompt": LONG},
    "/detokenize": {"tokens": [1] * SMALL_BYTES},
}
SMALL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [1], "max_tokens": 1},
    "/v1/embeddings": {"input": [1]},
    "/detokenize": {"tokens": [1]},
}


def containers(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers, value.values()))
    return 1 + sum(map(containers, value)) if isinstance(value, list) else 0


@given(VALUES, st.booleans(), st.integers(1, 12))
def test_containers_are_counted_without_brackets_in_strings(value: Any, escaped: bool, piece: int) -> None:
    """The body is fed in pieces that may end within a string or after a backslash."""
    body, count = json.dumps(value, ensure_ascii=escaped).encode(), containers(value)
    check_containers(body, count, piece)
    if count:
        with pytest.raises(ApiError, match=f"more than {count - 1} lists"):
            check_containers(body, count - 1, piece)


@given(st.integers(0, 9), st.integers(1, 4))
def test_string_ends_at_a_quote_after_an_even_number_of_backslashes(count: int, piece: int) -> None:
    body = b'["' + b"\\" * count + b'",[[["'
    outside = 1 if count % 2 else 4
    check_containers(body, outside, piece)
    with pytest.raises(ApiError):
        check_containers(body, outside - 1, piece)


@pytest.mark.parametrize("body", [b'{"a": "[[[', b'"\\', b'"' + b"\\" * 101, b'["[' * 50])
def test_malformed_json_is_left_to_the_decoder(body: bytes) -> None:
    check_containers(body)
    check_containers(body, 51, 7)


async def test_event_loop_runs_while_a_large_body_is_parsed() -> None:
    reader, turned = BodyReader(), threading.Event()

    def read(body: bytes) -> bool:
        return turned.wait(60)  # set by the event loop, which must not be blocked

    asyncio.get_running_loop().call_soon(turned.set)
    assert await reader.parse_body(b" " * (SMALL_BYTES + 1), read, {})
    reader.close()


class ControlledReader:
    """A body reader whose parser waits until `free` is set; `order` lists the bodies it began to parse."""

    def __init__(self) -> None:
        self.reader = BodyReader()
        self.order: list[str] = []
        self.begun = threading.Event()
        self.free = threading.Event()

    def read(self, name: str) -> asyncio.Task[None]:
        """Start to parse a large body; the first letter of `name` is the name of its tenant."""

        def parse(body: bytes) -> None:
            self.order.append(name)
            self.begun.set()
            assert self.free.wait(60)

        scope = {TENANT_KEY: Tenant(Grant(name=name[0], digest=b""))}
        return asyncio.create_task(self.reader.parse_body(b" " * (SMALL_BYTES + 1), parse, scope))

    async def first(self, *names: str) -> list[asyncio.Task[None]]:
        """Start to parse several bodies, and return once the first one is being parsed."""
        tasks = [self.read(name) for name in names]
        assert await asyncio.to_thread(self.begun.wait, 60)
        return tasks


async def test_tenants_alternate_at_large_bodies() -> None:
    """A tenant waits for at most one body of each other tenant, however many bodies the others have sent."""
    reading = ControlledReader()
    tasks = await reading.first("a1", "a2", "a3", "a4")
    tasks += [reading.read(name) for name in ("b1", "b2", "c1")]
    await asyncio.sleep(0.01)
    assert reading.order == ["a1"]
    reading.free.set()
    await asyncio.gather(*tasks)
    assert reading.order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]
    reading.reader.close()


@pytest.mark.parametrize("number", range(4))
async def test_cancelled_waiter_does_not_block_others(number: int) -> None:
    """If the cancelled waiter's body is being parsed, the thread finishes it before parsing the next one."""
    reading = ControlledReader()
    tasks = await reading.first("a1", "a2", "a3", "a4")
    tasks.append(reading.read("b1"))
    await asyncio.sleep(0.01)
    cancelled = tasks.pop(number)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert reading.order == ["a1"]
    reading.free.set()
    await asyncio.gather(*tasks)
    remaining = [name for name in ("a2", "a3", "a4") if name != f"a{number + 1}"]
    assert reading.order == ["a1", "b1", *remaining]
    await asyncio.wait_for(reading.read("b2"), 60)
    reading.reader.close()


async def test_unparsable_body_does_not_block_others() -> None:
    reading = ControlledReader()
    reading.free.set()

    def fails(body: bytes) -> None:
        raise ValueError("no body")

    with pytest.raises(ValueError, match="no body"):
        await reading.reader.parse_body(b" " * (SMALL_BYTES + 1), fails, {})
    await asyncio.wait_for(reading.read("b1"), 60)
    reading.reader.close()


@pytest.mark.parametrize("path", BODIES)
async def test_every_endpoint_parses_large_bodies_off_the_loop(
    live: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    fields = BODIES[path]
    threads: list[int] = []
    decode = BodyDecoder.decode

    def seen(decoder: BodyDecoder[Any], body: bytes) -> Any:
        threads.append(threading.get_ident())
        return decode(decoder, body)

    monkeypatch.setattr(BodyDecoder, "decode", seen)
    gateway = await live(scripted())
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        answer = await client.post(path, json={"model": "demo", **fields})
        assert answer.status_code in (200, 400), answer.text  # 400 for prompts beyond the context length
        assert len(threads) == 1
        assert threading.get_ident() not in threads
        if path in SMALL:
            answer = await client.post(path, json={"model": "demo", **SMALL[path]})
            assert answer.status_code == 200, answer.text
            assert threads[1:] == [threading.get_ident()]


async def test_body_with_too_many_containers_is_400(live: Any, scripted: Any) -> None:
    body = b'{"model": "demo", "prompt": [' + b",".join([b"[1]"] * 110_000) + b"]}"
    gateway = await live(scripted())
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        answer = await client.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "body_too_complex"


@pytest.mark.parametrize("length", [1, PIECE_ITEMS, PIECE_ITEMS + 1, 3 * PIECE_ITEMS + 5])
def test_token_ids_are_the_same_when_parsed_in_pieces(length: int) -> None:
    ids = parse_token_ids(list(range(length)), "prompt")
    assert ids.tolist() == list(range(length))
    assert np.array_equal(prompt_array(ids), np.arange(length, dtype=np.int32))


@pytest.mark.parametrize(("wrong", "code"), [(True, "invalid_type"), (-1, "out_of_range")])
def test_invalid_token_id_is_found_in_every_piece(wrong: Any, code: str) -> None:
    for place in (0, PIECE_ITEMS - 1, PIECE_ITEMS, 2 * PIECE_ITEMS):
        ids: list[Any] = [7] * (2 * PIECE_ITEMS + 1)
        ids[place] = wrong
        with pytest.raises(ApiError) as caught:
            parse_token_ids(ids, "prompt")
        assert caught.value.code == code


def test_waiting_token_ids_take_little_more_memory_than_their_body() -> None:
    """The byte budget of bodies bounds memory only if token ids take about as many bytes as their JSON."""
    body = json.dumps({"model": "demo", "prompt": list(range(70_000, 170_000))}).encode()
    parser = RequestParser()
    tracemalloc.start()
    try:
        generation = parser.parse_completion(body)
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(generation.prompt or ()) == 100_000
    assert used_bytes < 1.5 * len(body)
