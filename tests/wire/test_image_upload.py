# SPDX-License-Identifier: Apache-2.0
"""A gateway's client sends the images that an engine requests, without delaying other frames."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.asyncio

from mizzen.wire.client.engine_client import EngineLink
from mizzen.wire.client.image_upload import QUEUED_PARTS, SentImage
from mizzen.wire.client.stream import EngineStream, StreamLost
from mizzen.wire.codec import encode, engine_decoder
from mizzen.wire.messages import (
    IMAGE_PART_BYTES,
    PROTOCOL,
    Abort,
    Blocks,
    Finish,
    Generate,
    ImageContent,
    ImageReference,
    NeedImages,
    Outputs,
    Sampling,
    Welcome,
    WireMessage,
)

SAMPLING = Sampling(max_tokens=4, seed=0)


def image(content: bytes) -> SentImage:
    digest = hashlib.sha256(content).digest()
    return SentImage(ImageReference(digest, b"\0\0\0\0", len(content), 10, 10), content)


class PartReader:
    """An engine's socket; `read` returns the gateway's next message."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, images: bool = True) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.rcvhwm = 2
        self.socket.bind(endpoint)
        self._images = images
        self._decode = engine_decoder()
        self._peer = b""

    async def read(self, seconds: float = 60.0) -> Any:
        async with asyncio.timeout(seconds):
            self._peer, frame = await self.socket.recv_multipart()
        return self._decode(frame)

    async def welcome(self) -> None:
        await self.read()
        await self.send(
            Welcome(PROTOCOL, "e", "1", "r", "m", "t", {}, 2048, 512, (), 16, 8, False, images=self._images)
        )
        await self.send(Blocks(0, b"", b"", reset=True))

    async def send(self, message: WireMessage) -> None:
        await self.socket.send_multipart((self._peer, encode(message)))

    async def parts(self, count: int) -> list[ImageContent]:
        """Return the next parts of images; no other messages may come between."""
        parts = [await self.read() for _ in range(count)]
        assert all(isinstance(part, ImageContent) for part in parts)
        return parts

    async def image(self, size: int) -> bytes:
        """Return an image whose parts arrive next."""
        parts = await self.parts(-(-size // IMAGE_PART_BYTES))
        assert [part.offset for part in parts] == list(range(0, size, IMAGE_PART_BYTES))
        return b"".join(part.content for part in parts)


@pytest.fixture
async def connect(tmp_path: Any) -> AsyncIterator[Callable[..., Any]]:
    context = zmq.asyncio.Context()
    tasks: list[asyncio.Task[None]] = []

    async def connected(images: bool = True) -> tuple[EngineLink, PartReader]:
        endpoint = f"ipc://{tmp_path}/wire"
        engine = PartReader(context, endpoint, images)
        link = EngineLink(endpoint, gateway="g", context=context, timeout_seconds=60)
        tasks.append(asyncio.create_task(link.run()))
        await engine.welcome()
        async with asyncio.timeout(60):
            while link.welcome is None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return link, engine

    yield connected
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    context.destroy(linger=0)


def generate(link: EngineLink, *contents: bytes) -> EngineStream:
    prompt = np.array([1, 2, 3], "<i4").tobytes()
    return link.generate(prompt, SAMPLING, images=[image(content) for content in contents])


async def need(engine: PartReader, stream: EngineStream, *contents: bytes) -> None:
    digests = tuple(hashlib.sha256(content).digest() for content in contents)
    await engine.send(NeedImages(stream.rid, digests))


async def request_large(link: EngineLink, engine: PartReader, parts: int) -> EngineStream:
    """Let the engine request an image with a number of full parts; return the stream of its request."""
    content = bytes(parts * IMAGE_PART_BYTES)
    stream = generate(link, content)
    await engine.read()
    await need(engine, stream, content)
    return stream


async def test_request_has_references_and_no_bytes(connect: Any) -> None:
    link, engine = await connect()
    generate(link, b"cat" * 1000)
    message = await engine.read()
    assert isinstance(message, Generate)
    (reference,) = message.images
    assert (reference.digest, reference.size) == (hashlib.sha256(b"cat" * 1000).digest(), 3000)
    with pytest.raises(TimeoutError):
        await engine.read(0.2)


async def test_requested_image_is_sent_in_parts_and_again_if_requested_again(connect: Any) -> None:
    link, engine = await connect()
    content = np.random.default_rng(0).bytes(5 * IMAGE_PART_BYTES // 2)
    stream = generate(link, content, b"dog")
    await engine.read()
    await need(engine, stream, content)
    assert await engine.image(len(content)) == content
    await need(engine, stream, content)
    assert await engine.image(len(content)) == content
    assert (link.image_counts.requested, link.image_counts.sent) == (2, 2)
    assert link.image_counts.sent_bytes == 2 * len(content)


async def test_unknown_digests_and_ended_requests_are_ignored(connect: Any) -> None:
    link, engine = await connect()
    first, second = generate(link, b"cat"), generate(link, b"dog")
    assert isinstance(await engine.read(), Generate)
    assert isinstance(await engine.read(), Generate)
    await need(engine, first, b"bird")
    await engine.send(NeedImages(first.rid + 1000, (hashlib.sha256(b"cat").digest(),)))
    await engine.send(Outputs(1, b"", b"", b"", b"", (Finish(first.rid, 2, 3, 0, 0),)))
    await need(engine, first, b"cat")
    await need(engine, second, b"dog", b"dog")
    (part,) = await engine.parts(1)
    assert (part.rid, part.content) == (second.rid, b"dog")
    with pytest.raises(TimeoutError):
        await engine.read(0.2)


async def test_image_that_is_being_sent_is_not_sent_twice(connect: Any) -> None:
    link, engine = await connect()
    stream = await request_large(link, engine, 20)
    first = await engine.read()
    await need(engine, stream, bytes(20 * IMAGE_PART_BYTES))
    rest = await engine.parts(19)
    assert [part.offset // IMAGE_PART_BYTES for part in (first, *rest)] == list(range(20))
    assert link.image_counts.requested == 1


async def test_other_requests_overtake_a_large_image(connect: Any) -> None:
    link, engine = await connect()
    await request_large(link, engine, 40)
    await engine.parts(1)
    generate(link)
    before = 0
    while not isinstance(await engine.read(), Generate):
        before += 1
    assert before < 4 * QUEUED_PARTS  # parts in the queue, and parts that the sockets buffer


async def test_requests_take_turns(connect: Any) -> None:
    link, engine = await connect()
    large, small = bytes(40 * IMAGE_PART_BYTES), b"small"
    streams = [generate(link, large), generate(link, small)]
    for _ in streams:
        await engine.read()
    await need(engine, streams[0], large)
    await need(engine, streams[1], small)
    before = 0
    while (await engine.read()).rid != streams[1].rid:
        before += 1
    assert before < 4 * QUEUED_PARTS


async def test_engine_that_does_not_read_holds_a_bounded_number_of_parts(connect: Any) -> None:
    link, engine = await connect()
    stream = await request_large(link, engine, 40)
    await asyncio.sleep(0.5)
    assert link.image_counts.sent_bytes < 5 * QUEUED_PARTS * IMAGE_PART_BYTES
    sent = link.image_counts.sent_bytes
    stream.abort()
    assert not stream.images  # the bytes are released even if the engine never reads
    while not isinstance(await engine.read(), Abort):
        pass
    assert link.image_counts.sent_bytes == sent


async def test_engine_without_images_gets_none(connect: Any) -> None:
    link, engine = await connect(images=False)
    with pytest.raises(StreamLost, match="does not accept images"):
        generate(link, b"cat")
    generate(link)
    assert (await engine.read()).images == ()
