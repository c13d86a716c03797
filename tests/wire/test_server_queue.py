# SPDX-License-Identifier: Apache-2.0
"""The engine's server: handles, the bounded queue, timeouts, draining, stats, files and connection limits."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq
from frames import LOAD, column

from mizzen.core.outputs import Load
from mizzen.core.request import FinishReason
from mizzen.wire.codec import encode
from mizzen.wire.messages import (
    FILE_PART_BYTES,
    FetchFile,
    File,
    Hello,
    Outputs,
    RefusalCode,
    Refused,
    Stats,
    Welcome,
)
from mizzen.wire.server.engine_server import WireServer


def test_reused_handle_is_rejected_without_affecting_the_live_request(bench: Any) -> None:
    gateway = bench.gateway()
    rid = bench.submit(gateway, 5)
    gateway.generate(5)
    refused = bench.expect(gateway, Refused)
    assert (refused.rid, refused.code) == (None, RefusalCode.INVALID)
    assert "rid 5 is in use" in refused.message
    bench.step(1, [(rid, 0, [3])])
    assert column(bench.expect(gateway, Outputs).rids) == [5]


def test_abort_is_answered_by_a_finish(bench: Any) -> None:
    gateway = bench.gateway()
    rid = bench.submit(gateway, 5)
    gateway.abort(5)
    gateway.abort(5)
    gateway.abort(6)  # an unknown handle is ignored
    bench.until(lambda: rid in bench.aborts)
    bench.server.out.finish([bench.end(rid, FinishReason.ABORT)], 3)
    frame = bench.expect(gateway, Outputs)
    assert (frame.step, frame.rids, frame.finished[0].rid) == (3, b"", 5)
    assert frame.finished[0].reason == FinishReason.ABORT


def test_late_abort_does_not_affect_the_next_owner_of_an_id(bench: Any) -> None:
    closing, staying = bench.gateway(), bench.gateway()
    first = bench.submit(closing, 1)
    closing.socket.close()
    bench.until(
        lambda: not bench.server.out.send_to(peer_of(bench, first), b"x")
    )  # the server has noticed the disconnect
    bench.step(1, [(first, 0, [5])], (bench.end(first),))  # the request ends before its abort is delivered
    assert bench.submit(staying, 2) == first
    bench.pump()
    assert bench.aborts == []


def peer_of(bench: Any, rid: int) -> Any:
    return bench.server.out.peers.at(int(bench.server.out.table.owner[rid]))


def test_second_hello_restarts_the_connection(bench: Any) -> None:
    gateway = bench.gateway()
    rid = bench.submit(gateway, 5)
    gateway.hello()
    bench.expect(gateway, Welcome)
    assert bench.aborts == [rid]
    bench.step(1, [(rid, 0, [3])], (bench.end(rid),))
    new_rid = bench.submit(gateway, 5)
    bench.step(2, [(new_rid, 0, [4])])
    assert column(bench.expect(gateway, Outputs).tokens) == [4]


def test_queue_is_bounded_and_reserves_a_share_for_each_gateway(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_waiting=8)
    greedy, modest = bench.gateway(), bench.gateway()
    for handle in range(6):  # all except the other gateway's reserved share of 8 / 2 / 2
        bench.submit(greedy, handle)
        bench.waiting += 1
    greedy.generate(9)
    refused = bench.expect(greedy, Refused)
    assert (refused.rid, refused.code) == (9, RefusalCode.QUEUE_FULL)
    assert "6 requests are waiting; at most 8" in refused.message
    assert refused.retry_after_seconds > 0
    for handle in range(2):
        bench.submit(modest, handle)
        bench.waiting += 1
    modest.generate(9)
    assert bench.expect(modest, Refused).code == RefusalCode.QUEUE_FULL


def test_requests_received_in_one_call_count_towards_the_queue_bound(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_waiting=3)
    gateway = bench.gateway()
    for handle in range(6):
        gateway.generate(handle)
    refused = bench.server.out.counters.refused

    def answered() -> bool:
        bench.waiting = len(bench.requests)  # as the engine updates it after each receive
        return len(bench.requests) + refused[RefusalCode.QUEUE_FULL] == 6

    bench.until(answered)
    assert len(bench.requests) == 3


def test_queue_timeout_rejects_the_request_and_frees_its_handle(bench: Any) -> None:
    gateway = bench.gateway()
    expired_rid = bench.submit(gateway, 5, queue_seconds=2.0)
    started_rid = bench.submit(gateway, 6, queue_seconds=2.0)
    bench.step(1, [(started_rid, 0, [1])])
    assert bench.server.next_timeout() == 102.0
    bench.now += 1.9
    bench.pump()
    assert bench.aborts == []
    bench.now += 0.2
    refused = bench.expect(gateway, Refused)
    assert (refused.rid, refused.code) == (5, RefusalCode.QUEUE_TIMEOUT)
    assert "2.1 s" in refused.message
    assert bench.aborts == [expired_rid]
    bench.submit(gateway, 5)
    gateway.inbox.clear()
    bench.server.out.finish([bench.end(expired_rid, FinishReason.ABORT)], 1)
    bench.step(2, [(started_rid, 1, [1])])
    assert bench.expect(gateway, Outputs).finished == ()  # the expired request is not reported a second time


def test_queue_deadlines_of_finished_requests_are_removed(bench: Any) -> None:
    gateway = bench.gateway()
    for number in range(40):
        rids = []
        for handle in range(100):
            gateway.generate(handle, queue_seconds=10_000.0)
        bench.until(lambda: len(bench.requests) == 100)
        rids = list(bench.requests)
        ends = tuple(bench.end(rid) for rid in rids)
        bench.step(number, [(rid, 0, [1]) for rid in rids], ends)
        gateway.drain()
    assert len(bench.server._timeouts) < 1500


def test_draining_engine_announces_the_drain_and_rejects_requests(bench: Any) -> None:
    gateway = bench.gateway()
    rid = bench.submit(gateway, 1)
    bench.server.out.drain()
    bench.server.out.stats(LOAD, 0, bench.now)
    assert bench.expect(gateway, Stats).draining
    gateway.generate(2)
    assert bench.expect(gateway, Refused).code == RefusalCode.DRAINING
    new_gateway = bench.gateway(hello=False)
    new_gateway.hello()
    assert bench.expect(new_gateway, Welcome).draining
    bench.step(1, [(rid, 0, [1])], (bench.end(rid),))
    assert bench.expect(gateway, Outputs).finished[0].rid == 1


def test_stats_are_sent_on_change_and_every_second(bench: Any) -> None:
    gateway = bench.gateway()

    def stats_are_sent(load: Load, steps: int) -> bool:
        bench.server.out.stats(load, steps, bench.now)
        gateway.send(FetchFile("x"))
        bench.expect(gateway, Refused)  # frames keep their order, so earlier stats have arrived, too
        return gateway.take(Stats) is not None

    assert stats_are_sent(LOAD, 1)
    bench.now += 0.5
    assert not stats_are_sent(LOAD, 2)  # a new step number alone does not count as a change
    changed_load = Load(running=2, waiting=2, waiting_tokens=3, pages_total=4, pages_used=5, pages_cached=6)
    assert stats_are_sent(changed_load, 2)
    bench.now += 0.001
    assert not stats_are_sent(LOAD, 2)  # too soon after the previous stats
    bench.now += 1.1
    assert stats_are_sent(changed_load, 3)


def test_files_are_sent_in_parts(make_bench: Callable[..., Any]) -> None:
    content = bytes(range(256)) * (FILE_PART_BYTES // 256) + b"the rest"
    bench = make_bench(files={"tokenizer.json": content, "empty": b""})
    gateway = bench.gateway()
    received = b""
    while len(received) < len(content):
        gateway.send(FetchFile("tokenizer.json", len(received)))
        message = bench.expect(gateway, File)
        assert (message.name, message.offset, message.size) == ("tokenizer.json", len(received), len(content))
        received += message.content
    assert received == content
    gateway.send(FetchFile("empty"))
    assert bench.expect(gateway, File).content == b""


@pytest.mark.parametrize(
    ("name", "offset"),
    [
        ("../secret", 0),
        ("tokenizer.json", 5),
        ("tokenizer.json", -FILE_PART_BYTES),
        ("tokenizer.json", 2**62),
    ],
)
def test_unknown_files_and_offsets_are_rejected(
    make_bench: Callable[..., Any], name: str, offset: int
) -> None:
    bench = make_bench(files={"tokenizer.json": b"12345678"})
    gateway = bench.gateway()
    gateway.send(FetchFile(name, offset))
    refused = bench.expect(gateway, Refused)
    assert (refused.rid, refused.code) == (None, RefusalCode.INVALID)


def test_many_requests_grow_the_table(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_waiting=10_000)
    gateway = bench.gateway()
    for handle in range(2500):
        gateway.generate(handle * 3)
    bench.until(lambda: len(bench.requests) == 2500)
    rids = list(bench.requests)
    bench.step(1, [(rid, 0, [rid % 1000]) for rid in rids])
    frame = bench.expect(gateway, Outputs)
    assert column(frame.rids) == [handle * 3 for handle in range(2500)]


def test_a_message_of_several_frames_is_malformed(bench: Any) -> None:
    gateway = bench.gateway()
    gateway.socket.send_multipart([b"", encode(Hello(1, "req"))])
    assert "2 frames" in bench.expect(gateway, Refused).message
    assert bench.server.out.counters.malformed == 1


def test_numbers_out_of_msgpack_range_are_malformed(bench: Any) -> None:
    gateway = bench.gateway()
    packed = struct.pack("<i", 1)
    gateway.send(msgspec.msgpack.encode(["Generate", "5", packed, []]))
    assert "malformed frame" in bench.expect(gateway, Refused).message


def test_the_number_of_gateways_is_bounded(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(peers=2)
    first, _ = bench.gateway(), bench.gateway()
    third = bench.gateway(hello=False)
    third.hello()
    assert "2 gateways are connected" in bench.expect(third, Refused).message
    first.socket.close()

    def disconnect_is_noticed() -> bool:
        bench.now += 1.1
        bench.server.out.stats(LOAD, 0, bench.now)
        return len(bench.server.out.peers) == 1

    bench.until(disconnect_is_noticed)
    third.hello()
    bench.expect(third, Welcome)


def test_occupied_port_is_a_clear_error(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    with pytest.raises(ValueError, match="cannot listen on tcp:"):
        make_bench(endpoint=bench.server.endpoint)


def test_close_delivers_sent_frames(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(linger_seconds=2.0)
    gateway = bench.gateway()
    rid = bench.submit(gateway, 5)
    bench.step(1, [(rid, 0, [1])], (bench.end(rid),))
    bench.server.close()
    assert gateway.read(2)
    while gateway.read(0.1):
        pass
    assert any(isinstance(message, Outputs) for message in gateway.inbox)


def test_server_socket_is_a_mandatory_router(bench: Any) -> None:
    server: WireServer = bench.server
    [(_, socket)] = server._listeners
    assert socket.type == zmq.ROUTER
    assert socket.sndhwm == 1000
