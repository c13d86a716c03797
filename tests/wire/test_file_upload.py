# SPDX-License-Identifier: Apache-2.0
"""The engine sends files in parts: a few at a time, and no further ones to a gateway that does not read."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from zmq.utils import garbage

from mizzen.wire.messages import FILE_PART_BYTES, FetchFile, File, RefusalCode, Refused, Welcome

FILES = {"tokenizer.json": bytes(4 * FILE_PART_BYTES + 100)}
NAME = "tokenizer.json"


class UploadBench:
    """A `WireBench` over an ipc socket, which buffers little; counts the file parts that the engine sends."""

    def __init__(self, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = bench
        self.parts_sent = 0
        out = bench.server.out
        send = out.send_to

        def send_to(peer: Any, frame: Any) -> bool:
            self.parts_sent += len(frame) > FILE_PART_BYTES
            return send(peer, frame)

        monkeypatch.setattr(out, "send_to", send_to)

    def non_reading_gateway(self) -> Any:
        """Return a connected gateway whose socket buffers at most one message until a test reads it."""
        gateway = self.bench.gateway(hello=False)
        gateway.socket.disconnect(self.bench.server.endpoint)
        gateway.socket.rcvhwm = 1
        gateway.socket.heartbeat_ivl = 0
        gateway.socket.connect(self.bench.server.endpoint)
        gateway.hello()
        self.bench.expect(gateway, Welcome)
        return gateway

    def request_parts(self, gateway: Any, count: int) -> None:
        """Request the first part of the file `count` times, and give the engine time to answer."""
        for _ in range(count):
            gateway.send(FetchFile(NAME))
        for _ in range(20):
            self.bench.pump()
            time.sleep(0.005)


@pytest.fixture
def uploader(make_bench: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UploadBench:
    bench = make_bench(endpoint=f"ipc://{tmp_path}/wire", files=FILES, heartbeat_seconds=600)
    return UploadBench(bench, monkeypatch)


def messages_of(gateway: Any, kind: type) -> list[Any]:
    gateway.drain()
    return [message for message in gateway.inbox if isinstance(message, kind)]


def large_frames() -> int:
    """Return the number of file parts that ZMQ keeps in memory, summed over all connections."""
    kept_objects = [reference.obj for reference in tuple(garbage.gc.refs.values())]
    return sum(isinstance(frame, bytes) and len(frame) > FILE_PART_BYTES for frame in kept_objects)


def test_gateway_that_does_not_read_holds_a_bounded_number_of_parts(uploader: UploadBench) -> None:
    bench, gateway = uploader.bench, uploader.non_reading_gateway()
    uploader.request_parts(gateway, 100)
    assert uploader.parts_sent < 8  # two queued parts, and those buffered by the connection and the gateway
    assert bench.server.out.counters.refused[RefusalCode.QUEUE_FULL] > 80
    assert len(bench.server.out.peers) == 1
    bench.submit(gateway, 1)  # requests of this gateway and files for other gateways still work
    reading_gateway = bench.gateway()
    reading_gateway.send(FetchFile(NAME, FILE_PART_BYTES))
    assert bench.expect(reading_gateway, File).offset == FILE_PART_BYTES
    bench.until(lambda: len(messages_of(gateway, File)) + len(messages_of(gateway, Refused)) == 100)
    assert {message.code for message in messages_of(gateway, Refused)} == {RefusalCode.QUEUE_FULL}
    gateway.inbox.clear()
    gateway.send(FetchFile(NAME, FILE_PART_BYTES))  # the gateway reads again, so it gets parts again
    bench.expect(gateway, File)


def test_second_hello_does_not_raise_the_part_limit(uploader: UploadBench) -> None:
    bench, gateway = uploader.bench, uploader.non_reading_gateway()
    for _ in range(10):
        uploader.request_parts(gateway, 3)
        gateway.hello()
    assert uploader.parts_sent < 8
    bench.until(lambda: len(messages_of(gateway, Welcome)) == 10)
    assert all(len(peer.file_requests) <= 3 for peer in bench.server.out.peers)


def test_parts_of_a_disconnected_gateway_are_released(uploader: UploadBench) -> None:
    gateway = uploader.non_reading_gateway()
    uploader.request_parts(gateway, 8)
    assert large_frames() == 2
    gateway.socket.close()
    reading_gateway = uploader.bench.gateway()

    def parts_are_released() -> bool:
        reading_gateway.send(FetchFile(NAME, 4 * FILE_PART_BYTES))
        uploader.bench.expect(reading_gateway, File)
        return not large_frames()

    uploader.bench.until(parts_are_released)


def test_engine_sends_a_bounded_number_of_parts_between_steps(uploader: UploadBench) -> None:
    bench, gateways = uploader.bench, [uploader.bench.gateway() for _ in range(6)]
    for gateway in gateways:
        gateway.send(FetchFile(NAME))
    most_per_step = 0

    def all_served() -> bool:
        nonlocal most_per_step
        parts_before = uploader.parts_sent
        bench.pump()
        most_per_step = max(most_per_step, uploader.parts_sent - parts_before)
        return all(messages_of(gateway, File) for gateway in gateways)

    deadline = time.monotonic() + 60
    while not all_served():
        assert time.monotonic() < deadline
    assert most_per_step <= 2
    assert uploader.parts_sent == 6


def test_idle_engine_does_not_sleep_while_a_part_can_be_sent(uploader: UploadBench) -> None:
    gateway, bench = uploader.non_reading_gateway(), uploader.bench
    uploader.request_parts(gateway, 8)
    began = time.monotonic()
    bench.server.wait(30)
    assert time.monotonic() - began < 10
    bench.until(lambda: len(messages_of(gateway, File)) == 8)
    assert not messages_of(gateway, Refused)


def test_gateway_may_request_all_parts_of_a_file_at_once(uploader: UploadBench) -> None:
    gateway = uploader.bench.gateway()
    offsets = range(0, len(FILES[NAME]), FILE_PART_BYTES)
    for offset in offsets:
        gateway.send(FetchFile(NAME, offset))
    uploader.bench.until(lambda: len(messages_of(gateway, File)) == len(offsets))
    files = messages_of(gateway, File)
    assert [file.offset for file in files] == list(offsets)
    assert b"".join(file.content for file in files) == FILES[NAME]
