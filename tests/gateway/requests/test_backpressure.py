# SPDX-License-Identifier: Apache-2.0
"""Clients that do not read their answers: their unread output is bounded, and other clients are served."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen.gateway.requests.answer import AnswerPiece
from mizzen.gateway.requests.backpressure import PART_TOKENS, OutputQueue, StreamClient, UnreadOutput
from mizzen.gateway.requests.output import OutputDelta
from mizzen.gateway.requests.token_logprobs import ScoredToken, TopToken
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.wire.client.stream import MAX_UNREAD_TOKENS, StreamLost
from slow_readers import read_stream, request_unread
from tenant_kit import ALICE, BOB, key_file

BODY = {"model": "demo", "prompt": [5, 6, 7], "stream": True, "return_token_ids": True}
MANY = 20_000
"""Number of tokens in an answer whose events do not fit into the buffers of an `unread` connection."""


@pytest.fixture
async def unread() -> AsyncIterator[Callable[..., Any]]:
    """Return a function that requests a stream over a connection with small buffers, and does not read it."""
    clients: list[socket.socket] = []

    async def ask(gateway: Any, key: str = "none", **changes: Any) -> socket.socket:
        body = {**BODY, "max_tokens": MANY, **changes}
        clients.append(request_unread(gateway, "/v1/completions", body, key))
        return clients[-1]

    yield ask
    for client in clients:
        client.close()


def ids_of(events: list[dict[str, Any]], index: int = 0) -> list[int]:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return [token for choice in choices for token in choice["token_ids"]]


async def completes(gateway: Any, key: str = "none") -> None:
    """Check that a request of another client is answered within 10 s."""
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(timeout=10, headers=headers) as http:
        body = {"model": "demo", "prompt": [8, 9], "max_tokens": 3}
        answer = await http.post(f"{gateway.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("choices", [1, 3])
async def test_client_that_does_not_read_blocks_no_other(
    live: Any, scripted: Any, until: Any, unread: Any, choices: int
) -> None:
    """`max_in_flight` clients do not read for a while; afterwards, each of them reads its complete answer."""
    engine = scripted(context_length=100_000)
    engine.does.tokens_a_step = 50
    gateway = await live(engine, max_in_flight=3)
    clients = [await unread(gateway, n=choices) for _ in range(3)]
    await until(lambda: len(engine.requests) == 3 * choices and not engine.running)
    await completes(gateway)
    assert gateway.gateway.in_flight == 0
    assert [entry.requests for entry in gateway.gateway.engines] == [0]
    expected = (engine.does.reply * MANY)[:MANY]
    for client in clients:
        events = await read_stream(client)
        for index in range(choices):
            assert ids_of(events, index) == expected


async def test_client_that_does_not_read_may_run_another_request(
    live: Any, scripted: Any, until: Any, unread: Any, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(key_file({"name": "a", "key": ALICE, "maxParallel": 1, "tokensPerMinute": 10 * MANY}))
    engine = scripted(context_length=100_000)
    engine.does.tokens_a_step = 50
    gateway = await live(engine, api_keys_file=(str(path),))
    tenant = gateway.gateway.tenants.get("a")
    client = await unread(gateway, key=ALICE)
    await until(lambda: engine.requests and not engine.running and not gateway.gateway.in_flight)
    await until(lambda: tenant.running == 0)
    assert tenant.tokens.level == pytest.approx(
        9 * MANY - 3, abs=MANY / 2
    )  # the unread answer is already charged
    await completes(gateway, ALICE)
    await read_stream(client)
    await until(lambda: not gateway._servers[0].server_state.connections)
    assert tenant.running == 0


async def test_stop_string_ends_an_answer_that_is_not_read(
    live: Any, scripted: Any, until: Any, unread: Any, tokenizer: Tokenizer
) -> None:
    """The gateway aborts the request at the stop string, before the engine reaches `max_tokens`."""
    engine = scripted(context_length=100_000)
    words = tokenizer.encode("A mast holds the sails. ", False)
    engine.does.reply = words * 3000 + tokenizer.encode("Enough!", False)
    engine.does.tokens_a_step = 50
    gateway = await live(engine)
    client = await unread(gateway, max_tokens=90_000, stop="Enough")
    await until(lambda: len(engine.aborts) == 1)
    await until(lambda: not gateway.gateway.in_flight)
    events = await read_stream(client)
    assert "".join(event["choices"][0]["text"] for event in events) == "A mast holds the sails. " * 3000
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_unread_output_of_all_clients_is_bounded(
    live: Any, scripted: Any, until: Any, unread: Any, tmp_path: Path
) -> None:
    """The tenant with the most unread output loses its largest answer; the other tenant keeps its answer."""
    path = tmp_path / "keys.yaml"
    path.write_text(key_file({"name": "a", "key": ALICE}, {"name": "b", "key": BOB}))
    engine = scripted(context_length=100_000)
    engine.does.tokens_a_step = 50
    gateway = await live(engine, api_keys_file=(str(path),))
    bobs = await unread(gateway, key=BOB)
    await until(lambda: engine.requests and not engine.running and not gateway.gateway.in_flight)
    unread_output, connections = gateway.gateway.unread_output, gateway._servers[0].server_state.connections
    waiting = unread_output.total
    assert waiting > 1000
    unread_output._limit = 3.5 * waiting
    for number in range(2, 7):
        await unread(gateway, key=ALICE)
        await until(lambda n=number: len(engine.requests) == n and not gateway.gateway.in_flight)
        await until(lambda: unread_output.total <= 3.5 * waiting)
    assert unread_output.total > 2 * waiting
    assert len(connections) < 6
    expected = (engine.does.reply * MANY)[:MANY]
    assert ids_of(await read_stream(bobs)) == expected
    await completes(gateway, ALICE)


def piece(text: str, tokens: int, beside: int = 0) -> AnswerPiece:
    token = ScoredToken(1, b"a", -1.0, 0, (TopToken(1, b"a", -1.0),) * beside)
    return AnswerPiece(OutputDelta(text), [1] * tokens, None, [token] * tokens if beside else [])


@given(st.lists(st.integers(0, 400), max_size=60), st.integers(0, 3))
def test_output_queue_keeps_pieces_in_order_and_counts_exactly(sizes: list[int], beside: int) -> None:
    unread_output = UnreadOutput()
    output_queue = OutputQueue(unread_output, StreamClient("", None))
    for number, size in enumerate(sizes):
        output_queue.push(piece(f"{number},", size, beside), None)
    assert unread_output.total == sum(sizes) * (2 + beside if beside else 1)
    pieces = []
    while output_queue:
        pieces.append(output_queue.pop().piece)
    assert "".join(taken_piece.delta.content for taken_piece in pieces) == "".join(
        f"{n}," for n in range(len(sizes))
    )
    assert sum(len(taken_piece.token_ids) for taken_piece in pieces) == sum(sizes)
    assert all(len(taken_piece.token_ids) <= PART_TOKENS + 400 for taken_piece in pieces)
    assert unread_output.total == 0
    assert not unread_output._client_entries
    assert not unread_output._tenant_entries


async def test_unread_tokens_of_one_sequence_are_bounded() -> None:
    unread_output = UnreadOutput()
    parts = OutputQueue(unread_output, StreamClient("", None))
    for _ in range(MAX_UNREAD_TOKENS // 256):
        parts.push(piece("x", 256), None)
    with pytest.raises(StreamLost, match="slow client"):
        parts.push(piece("x", 1), None)
    await parts.close()
    assert unread_output.total == 0
