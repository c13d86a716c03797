"""Large bodies are read beside the event loop; what would hold the interpreter for long is refused."""

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

from mizzen.gateway.errors import ApiError
from mizzen.gateway.openai import parse, score, texts, vectors
from mizzen.gateway.openai.parse import Parser, token_ids
from mizzen.gateway.openai.prompt import given_ids
from mizzen.gateway.openai.reading import PIECE, SMALL_BYTES, BodyReader, check_containers
from mizzen.gateway.responses import parse as responses

VALUES = st.recursive(
    st.none() | st.text('[{"\\a', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('[{"\\', max_size=4), inner),
    max_leaves=12,
)
LONG = "x [1, 2] { " * (SMALL_BYTES // 10)
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/completions": (parse, {"prompt": [1] * SMALL_BYTES}),
    "/v1/chat/completions": (parse, {"messages": [{"role": "user", "content": LONG}]}),
    "/v1/responses": (responses, {"input": LONG}),
    "/v1/embeddings": (vectors, {"input": [[1] * SMALL_BYTES]}),
    "/v1/score": (score, {"query": [1] * SMALL_BYTES, "items": [[1]], "label_token_ids": [1]}),
    "/tokenize": (texts, {"prompt": LONG}),
    "/detokenize": (texts, {"tokens": [1] * SMALL_BYTES}),
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


@given(VALUES, st.booleans())
def test_lists_and_objects_are_counted_and_brackets_in_texts_are_not(value: Any, escaped: bool) -> None:
    body, count = json.dumps(value, ensure_ascii=escaped).encode(), containers(value)
    check_containers(body, count)
    if count:
        with pytest.raises(ApiError, match=f"more than {count - 1} lists"):
            check_containers(body, count - 1)


@pytest.mark.parametrize("body", [b'{"a": "[[[', b'"\\', b'"' + b"\\" * 101, b'["[' * 50])
def test_broken_text_is_left_to_the_decoder(body: bytes) -> None:
    check_containers(body)


async def test_the_loop_runs_while_a_large_body_is_read() -> None:
    reader, turned = BodyReader(), threading.Event()

    def read(body: bytes) -> bool:
        return turned.wait(60)  # for what only the loop does

    asyncio.get_running_loop().call_soon(turned.set)
    assert await reader.read(b" " * (SMALL_BYTES + 1), read)
    reader.close()


@pytest.mark.parametrize("path", BODIES)
async def test_every_endpoint_reads_large_bodies_beside_the_loop(
    live: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    module, fields = BODIES[path]
    threads: list[int] = []
    decode = module.decode

    def seen(decoder: Any, body: bytes) -> Any:
        threads.append(threading.get_ident())
        return decode(decoder, body)

    monkeypatch.setattr(module, "decode", seen)
    gateway = await live(scripted())
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        answer = await client.post(path, json={"model": "demo", **fields})
        assert answer.status_code in (200, 400), answer.text  # most are longer than the context
        assert len(threads) == 1
        assert threading.get_ident() not in threads
        if path in SMALL:
            answer = await client.post(path, json={"model": "demo", **SMALL[path]})
            assert answer.status_code == 200, answer.text
            assert threads[1:] == [threading.get_ident()]


async def test_a_body_of_too_many_lists_is_400(live: Any, scripted: Any) -> None:
    body = b'{"model": "demo", "prompt": [' + b",".join([b"[1]"] * 110_000) + b"]}"
    gateway = await live(scripted())
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        answer = await client.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "body_too_complex"


@pytest.mark.parametrize("length", [1, PIECE, PIECE + 1, 3 * PIECE + 5])
def test_token_ids_are_the_same_in_pieces(length: int) -> None:
    ids = token_ids(list(range(length)), "prompt")
    assert ids.tolist() == list(range(length))
    assert np.array_equal(given_ids(ids), np.arange(length, dtype=np.int32))


@pytest.mark.parametrize(("wrong", "code"), [(True, "invalid_type"), (-1, "out_of_range")])
def test_a_wrong_id_is_found_in_every_piece(wrong: Any, code: str) -> None:
    for place in (0, PIECE - 1, PIECE, 2 * PIECE):
        ids: list[Any] = [7] * (2 * PIECE + 1)
        ids[place] = wrong
        with pytest.raises(ApiError) as caught:
            token_ids(ids, "prompt")
        assert caught.value.code == code


def test_token_ids_take_little_more_than_their_body_while_they_wait() -> None:
    """Bodies in work are bounded by their bytes: a bound of memory only where requests keep as much."""
    body = json.dumps({"model": "demo", "prompt": list(range(70_000, 170_000))}).encode()
    parser = Parser()
    tracemalloc.start()
    try:
        wish = parser.completion(body)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(wish.prompt or ()) == 100_000
    assert held < 1.5 * len(body)
