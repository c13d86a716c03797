"""Parts of files: few at a time, and only to gateways that take them."""

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


class Uploader:
    """A bench whose socket holds little beyond ZMQ's queues, and that counts the parts that it sends."""

    def __init__(self, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = bench
        self.parts = 0
        out = bench.server.out
        send = out.send_to

        def send_to(peer: Any, frame: Any) -> bool:
            self.parts += len(frame) > FILE_PART_BYTES
            return send(peer, frame)

        monkeypatch.setattr(out, "send_to", send_to)

    def deaf(self) -> Any:
        """Return a gateway that said Hello and takes hardly anything unless it is read."""
        gateway = self.bench.gateway(hello=False)
        gateway.socket.disconnect(self.bench.server.endpoint)
        gateway.socket.rcvhwm = 1
        gateway.socket.heartbeat_ivl = 0
        gateway.socket.connect(self.bench.server.endpoint)
        gateway.hello()
        self.bench.expect(gateway, Welcome)
        return gateway

    def ask(self, gateway: Any, count: int) -> None:
        """Ask for parts, and let the engine turn until it has read all of them and has done what it can."""
        for _ in range(count):
            gateway.send(FetchFile(NAME))
        for _ in range(20):
            self.bench.pump()
            time.sleep(0.005)


@pytest.fixture
def uploader(make_bench: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Uploader:
    bench = make_bench(endpoint=f"ipc://{tmp_path}/wire", files=FILES, heartbeat_seconds=600)
    return Uploader(bench, monkeypatch)


def of(gateway: Any, kind: type) -> list[Any]:
    gateway.drain()
    return [message for message in gateway.inbox if isinstance(message, kind)]


def large_frames() -> int:
    """Return how many parts ZMQ keeps, of whichever connection."""
    kept = [one.obj for one in tuple(garbage.gc.refs.values())]
    return sum(isinstance(frame, bytes) and len(frame) > FILE_PART_BYTES for frame in kept)


def test_gateway_that_does_not_read_holds_a_bounded_number_of_parts(uploader: Uploader) -> None:
    bench, gateway = uploader.bench, uploader.deaf()
    uploader.ask(gateway, 100)
    assert uploader.parts < 8  # two under way, and what connection and gateway have taken
    assert bench.server.out.counters.refused[RefusalCode.QUEUE_FULL] > 80
    assert len(bench.server.out.peers) == 1
    bench.submit(gateway, 1)  # it is served otherwise, and so are others
    other = bench.gateway()
    other.send(FetchFile(NAME, FILE_PART_BYTES))
    assert bench.expect(other, File).offset == FILE_PART_BYTES
    bench.until(lambda: len(of(gateway, File)) + len(of(gateway, Refused)) == 100)
    assert {message.code for message in of(gateway, Refused)} == {RefusalCode.QUEUE_FULL}
    gateway.inbox.clear()
    gateway.send(FetchFile(NAME, FILE_PART_BYTES))  # whoever reads again is served again
    bench.expect(gateway, File)


def test_second_hello_does_not_raise_the_part_limit(uploader: Uploader) -> None:
    bench, gateway = uploader.bench, uploader.deaf()
    for _ in range(10):
        uploader.ask(gateway, 3)
        gateway.hello()
    assert uploader.parts < 8
    bench.until(lambda: len(of(gateway, Welcome)) == 10)
    assert all(len(peer.file_requests) <= 3 for peer in bench.server.out.peers)


def test_parts_of_a_disconnected_gateway_are_released(uploader: Uploader) -> None:
    gateway = uploader.deaf()
    uploader.ask(gateway, 8)
    assert large_frames() == 2
    gateway.socket.close()
    other = uploader.bench.gateway()

    def gone() -> bool:
        other.send(FetchFile(NAME, 4 * FILE_PART_BYTES))
        uploader.bench.expect(other, File)
        return not large_frames()

    uploader.bench.until(gone)


def test_engine_sends_a_bounded_number_of_parts_between_steps(uploader: Uploader) -> None:
    bench, gateways = uploader.bench, [uploader.bench.gateway() for _ in range(6)]
    for gateway in gateways:
        gateway.send(FetchFile(NAME))
    most = 0

    def all_served() -> bool:
        nonlocal most
        before = uploader.parts
        bench.pump()
        most = max(most, uploader.parts - before)
        return all(of(gateway, File) for gateway in gateways)

    deadline = time.monotonic() + 60
    while not all_served():
        assert time.monotonic() < deadline
    assert most <= 2
    assert uploader.parts == 6


def test_idle_engine_does_not_sleep_while_a_part_can_be_sent(uploader: Uploader) -> None:
    gateway, bench = uploader.deaf(), uploader.bench
    uploader.ask(gateway, 8)
    began = time.monotonic()
    bench.server.wait(30)
    assert time.monotonic() - began < 10
    bench.until(lambda: len(of(gateway, File)) == 8)
    assert not of(gateway, Refused)


def test_gateway_may_request_all_parts_of_a_file_at_once(uploader: Uploader) -> None:
    gateway = uploader.bench.gateway()
    offsets = range(0, len(FILES[NAME]), FILE_PART_BYTES)
    for offset in offsets:
        gateway.send(FetchFile(NAME, offset))
    uploader.bench.until(lambda: len(of(gateway, File)) == len(offsets))
    parts = of(gateway, File)
    assert [part.offset for part in parts] == list(offsets)
    assert b"".join(part.content for part in parts) == FILES[NAME]
