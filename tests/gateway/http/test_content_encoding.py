# SPDX-License-Identifier: Apache-2.0
"""Compressed request bodies: decompressed within the limits, or rejected with a reason."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen.gateway.errors import ApiError
from mizzen.gateway.http.content_encoding import PIECE_BYTES, BodyDecompressor, new_decompressor

BODY = {"model": "demo", "messages": [{"role": "user", "content": "Größe " * 2000}], "max_tokens": 2}
CONTENT = json.dumps(BODY).encode()


def deflate_raw(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


FORMS = {"gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress, "Deflate": deflate_raw}


class CompressingTransport(httpx.AsyncHTTPTransport):
    """Transport that compresses each request's body."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        content = FORMS[self._encoding](await request.aread())
        headers = {**request.headers, "content-encoding": self._encoding, "content-length": str(len(content))}
        compressed = httpx.Request(request.method, request.url, headers=headers, content=content)
        compressed.extensions = request.extensions
        return await super().handle_async_request(compressed)


@pytest.mark.parametrize("encoding", FORMS)
async def test_compressed_bodies_are_served(live: Any, scripted: Any, until: Any, encoding: str) -> None:
    engine = scripted(context_length=50_000)
    gateway = await live(engine)
    async with httpx.AsyncClient(transport=CompressingTransport(encoding)) as http:
        client = gateway.client(http_client=http)
        compressed = await client.chat.completions.create(**BODY)
    plain = await gateway.client().chat.completions.create(**BODY)
    assert compressed.choices[0].message.content == plain.choices[0].message.content
    assert engine.requests[0].prompt == engine.requests[1].prompt
    await until(lambda: gateway.gateway.body_budget.used == 0)


async def post(
    gateway: Any, content: bytes, *encodings: str, path: str = "chat/completions"
) -> httpx.Response:
    headers = [("content-encoding", encoding) for encoding in encodings]
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.post(f"{gateway.url}/v1/chat/completions", content=content, headers=headers)


@pytest.mark.parametrize(
    ("encodings", "named"),
    [
        (("br",), "'br'"),
        (("zstd",), "'zstd'"),
        (("gzip, gzip",), "'gzip, gzip'"),
        (("gzip", "br"), "'gzip, br'"),
    ],
)
async def test_other_encodings_get_415(
    live: Any, scripted: Any, encodings: tuple[str, ...], named: str
) -> None:
    response = await post(await live(scripted()), gzip.compress(CONTENT), *encodings)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (415, "unsupported_content_encoding")
    assert error["message"].startswith(f"Content-Encoding is {named}, which is not supported")
    assert response.headers["accept-encoding"] == "gzip, deflate"


async def test_identity_is_no_encoding(live: Any, scripted: Any) -> None:
    gateway = await live(scripted(context_length=50_000))
    for encodings in (("identity",), ("",), ("Identity,",)):
        assert (await post(gateway, CONTENT, *encodings)).status_code == 200


@pytest.mark.parametrize(
    ("content", "encoding", "reason"),
    [
        (CONTENT, "gzip", "incorrect header check"),
        (gzip.compress(CONTENT)[:-9], "gzip", "its end is missing"),
        (gzip.compress(CONTENT) + b"x", "gzip", "data follows its end"),
        (gzip.compress(CONTENT) * 2, "gzip", "data follows its end"),
        (gzip.compress(CONTENT)[:-8] + bytes(8), "gzip", "incorrect data check"),
        (b"\x78", "deflate", "its end is missing"),
        (b"\xff\xff\xff", "deflate", "invalid block type"),
    ],
    ids=["not-compressed", "cut", "trailing-byte", "two-members", "checksum", "deflate-cut", "not-deflate"],
)
async def test_invalid_compressed_bodies_get_400(
    live: Any, scripted: Any, until: Any, content: bytes, encoding: str, reason: str
) -> None:
    gateway = await live(scripted())
    response = await post(gateway, content, encoding)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_content_encoding")
    assert reason in error["message"]
    await until(lambda: gateway.gateway.body_budget.used == 0)


@pytest.mark.parametrize("encoding", FORMS)
async def test_decompression_is_bounded(live: Any, scripted: Any, until: Any, encoding: str) -> None:
    """A body of a few kilobytes that decompresses to 16 MiB stops at the limit."""
    block = bytes(1 << 20)
    wbits = {"deflate": zlib.MAX_WBITS, "Deflate": -zlib.MAX_WBITS}.get(encoding, 16 + zlib.MAX_WBITS)
    compressor = zlib.compressobj(9, wbits=wbits)
    bomb = b"".join([compressor.compress(block) for _ in range(16)]) + compressor.flush()
    assert len(bomb) < 1 << 16
    gateway = await live(scripted(), max_body_bytes=4 << 20)
    response = await post(gateway, bomb, encoding)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    await until(lambda: gateway.gateway.body_budget.used == 0)


async def test_budget_counts_decompressed_bytes(live: Any, scripted: Any) -> None:
    gateway = await live(scripted(), max_bodies_bytes=len(CONTENT) // 2, max_body_bytes=1 << 20)
    response = await post(gateway, gzip.compress(CONTENT), "gzip")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "bodies_too_large")


@given(st.binary(max_size=200), st.integers(1, 2000), st.sampled_from(sorted(FORMS)), st.data())
def test_data_does_not_depend_on_its_division_into_parts(
    seed: bytes, repeats: int, encoding: str, data: st.DataObject
) -> None:
    body = seed * repeats
    compressed = FORMS[encoding](body)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(compressed)), max_size=6)))
    decompressor = new_decompressor([(b"content-encoding", encoding.encode())])
    assert decompressor is not None
    pieces: list[bytes] = []
    for begin, end in zip([0, *cuts], [*cuts, len(compressed)], strict=True):
        pieces += decompressor.decompress(compressed[begin:end])
    decompressor.finish()
    assert b"".join(pieces) == body
    assert max(map(len, pieces), default=0) <= PIECE_BYTES


@pytest.mark.parametrize("size", [PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
@pytest.mark.parametrize("encoding", FORMS)
def test_pieces_end_where_the_data_ends(size: int, encoding: str) -> None:
    decompressor = BodyDecompressor("deflate" if encoding.lower() == "deflate" else "gzip")
    pieces = list(decompressor.decompress(FORMS[encoding](bytes(size))))
    decompressor.finish()
    assert b"".join(pieces) == bytes(size)


@given(st.binary(min_size=1, max_size=100), st.sampled_from(["gzip", "deflate"]))
def test_arbitrary_bytes_raise_no_other_error(body: bytes, encoding: str) -> None:
    decompressor = BodyDecompressor(encoding)
    try:
        list(decompressor.decompress(body))
        decompressor.finish()
    except ApiError as error:
        assert error.status == 400
