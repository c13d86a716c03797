"""The engine's socket: handshake, requests, streams, files, and what a gateway may not do."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from mizzen.core.outputs import CacheEvents, Load
from mizzen.core.request import FinishReason
from mizzen.core.sampling_params import SamplingParams
from mizzen.wire.codec import encode
from mizzen.wire.messages import (
    FILE_PART_BYTES,
    PROTOCOL,
    Blocks,
    FetchFile,
    File,
    Hello,
    Outputs,
    RefusalCode,
    Refused,
    Sampling,
    Stats,
    Welcome,
)
from mizzen.wire.server.engine_server import WireServer

LOAD = Load(running=1, waiting=2, waiting_tokens=3, pages_total=4, pages_used=5, pages_cached=6)


def column(packed: bytes, kind: str = "<u4") -> list[int]:
    return np.frombuffer(packed, dtype=kind).tolist()


def test_a_handshake_gives_the_engine_its_load_and_its_cache(bench: Any) -> None:
    bench.server.out.stats(LOAD, 7, bench.now)
    bench.server.out.blocks(CacheEvents(stored=(11, 12, 2**64 - 1)))
    bench.server.out.blocks(CacheEvents(evicted=(12,)))
    gateway = bench.gateway(hello=False)
    gateway.hello("gateway-1")
    welcome = bench.expect(gateway, Welcome)
    assert (welcome.engine, welcome.vocab_size, welcome.draining) == ("engine-0", 1000, False)
    assert bench.expect(gateway, Stats) == Stats(1, 2, 3, 4, 5, 6, False, 7)
    blocks = bench.expect(gateway, Blocks)
    assert (blocks.sequence, blocks.reset, blocks.evicted) == (0, True, b"")
    assert sorted(column(blocks.stored, "<u8")) == [11, 2**64 - 1]
    bench.server.out.blocks(CacheEvents(stored=(13,), evicted=(11,)))
    change = bench.expect(gateway, Blocks)
    assert (change.sequence, change.reset) == (1, False)
    assert (column(change.stored, "<u8"), column(change.evicted, "<u8")) == ([13], [11])


def test_patience_is_taken_back_at_once_and_only_once(bench: Any) -> None:
    gateway = bench.gateway()
    bench.server.out.stats(LOAD, 7, bench.now, patience=0.5)
    bench.server.out.withdraw_silence_limit()
    bench.server.out.withdraw_silence_limit()
    bench.server.out.stats(LOAD, 8, bench.now + 5.0)
    said = [bench.expect(gateway, Stats) for _ in range(3)]
    assert [(one.steps, one.patience_seconds) for one in said] == [(7, 0.5), (7, 0.0), (8, 0.0)]


def test_a_request_tells_its_tenant_and_one_turned_away_is_busy(bench: Any) -> None:
    gateway = bench.gateway()
    rid = bench.submit(gateway, 7, tenant=2**63 - 1)
    assert bench.requests[rid].tenant == 2**63 - 1
    away = msgspec.structs.replace(bench.end(rid), busy=True, message="grammar: too many")
    bench.server.out.finish([away], 1)
    refused = bench.expect(gateway, Refused)
    assert (refused.rid, refused.code, refused.message) == (7, RefusalCode.BUSY, "grammar: too many")
    assert refused.retry_after_seconds > 0
    bench.requests.clear()
    bench.submit(gateway, 7)  # the handle is free again


def test_another_protocol_is_refused_with_both_numbers(bench: Any) -> None:
    gateway = bench.gateway(hello=False)
    gateway.send(Hello(99, "old"))
    refused = bench.expect(gateway, Refused)
    assert (refused.rid, refused.code) == (None, RefusalCode.INVALID)
    assert "99" in refused.message
    assert f"speaks {PROTOCOL}" in refused.message
    gateway.generate(5)
    assert bench.expect(gateway, Refused).code == RefusalCode.UNKNOWN_PEER


def test_a_gateway_of_another_protocol_is_told_of_once_and_counted_each_time(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It tries again for ever, and each time on another connection."""

    def told() -> list[dict[str, Any]]:
        return [vars(one)["fields"] for one in caplog.records if "another protocol" in one.message]

    for name, protocol in (("a", 99), ("a", 99), ("b", 99), ("a", 98), ("b", 99)):
        gateway = bench.gateway(hello=False)
        gateway.send(Hello(protocol, name))
        bench.expect(gateway, Refused)
    assert told() == [
        {"gateway": name, "protocol": protocol, "spoken": PROTOCOL}
        for name, protocol in (("a", 99), ("b", 99), ("a", 98))
    ]
    assert bench.server.out.counters.other_protocol == 5
    for number in range(200):  # whoever makes up names is forgotten again
        gateway.send(Hello(number + 100, "a"))
        bench.expect(gateway, Refused)
    gateway.send(Hello(99, "b"))
    bench.expect(gateway, Refused)
    assert len(told()) == 204


def test_without_a_hello_nothing_is_taken(bench: Any) -> None:
    gateway = bench.gateway(hello=False)
    gateway.generate(5)
    refused = bench.expect(gateway, Refused)
    assert (refused.rid, refused.code) == (5, RefusalCode.UNKNOWN_PEER)
    assert not bench.requests


def test_a_request_arrives_as_it_was_sent(bench: Any) -> None:
    gateway = bench.gateway()
    sampling = Sampling(0.5, 7, 0.9, 0.1, -1, 20, True, (3, 4))
    rid = bench.submit(gateway, 42, prompt=[5, 6], sampling=sampling, salt=b"s", priority=-3)
    request = bench.requests[rid]
    assert request.prompt.tolist() == [5, 6]
    assert request.prompt.dtype == np.int32
    assert request.sampling == SamplingParams(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=-1, max_tokens=20, ignore_eos=True,
        stop_token_ids=(3, 4),
    )  # fmt: skip
    assert (request.seed, request.salt, request.priority, request.arrival) == (2**64 - 1, b"s", -3, 100.0)


def test_seeds_are_drawn_when_none_is_given(bench: Any) -> None:
    gateway = bench.gateway()
    rids = [bench.submit(gateway, handle) for handle in range(4)]
    seeds = {bench.requests[rid].seed for rid in rids}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_streams_are_numbered_and_end_once(bench: Any) -> None:
    gateway = bench.gateway()
    first, second = bench.submit(gateway, 1000), bench.submit(gateway, 2000)
    bench.now += 0.5
    assert bench.step(1, [(second, 0, [9]), (first, 0, [8])]).tolist() == [0.5, 0.5]
    frame = bench.expect(gateway, Outputs)
    rows = zip(column(frame.rids), column(frame.offsets), column(frame.tokens, "<i4"), strict=True)
    assert list(rows) == [(2000, 0, 9), (1000, 0, 8)]
    assert len(bench.step(2, [(first, 1, [7])], (bench.end(first),))) == 0
    frame = bench.expect(gateway, Outputs)
    assert (frame.step, column(frame.rids), column(frame.offsets)) == (2, [1000], [1])
    (end,) = frame.finished
    assert (end.rid, end.reason, end.prompt_tokens, end.output_tokens) == (1000, FinishReason.STOP, 3, 2)
    assert end.first_token_seconds == 0.5
    again = bench.submit(gateway, 1000)  # the handle is free again
    assert again == first  # and so is the engine's id
    assert bench.aborts == []


def test_two_gateways_see_their_own_rows_only(bench: Any) -> None:
    one, two = bench.gateway(), bench.gateway()
    rids = [bench.submit(gateway, handle) for handle in (7, 8) for gateway in (one, two)]
    bench.step(1, [(rid, 0, [100 + i]) for i, rid in enumerate(rids)], (bench.end(rids[3]),))
    frames = [bench.expect(gateway, Outputs) for gateway in (one, two)]
    assert [column(frame.rids) for frame in frames] == [[7, 8], [7, 8]]
    assert [column(frame.tokens) for frame in frames] == [[100, 102], [101, 103]]
    assert [[end.rid for end in frame.finished] for frame in frames] == [[], [8]]


@pytest.mark.parametrize("gateways", [1, 3])
def test_rows_of_several_tokens(make_bench: Callable[..., Any], gateways: int) -> None:
    bench = make_bench()
    ends = [bench.gateway() for _ in range(gateways)]
    rng = np.random.default_rng(gateways)
    rids = [(end, handle, bench.submit(end, handle)) for handle in range(5) for end in ends]
    given = {rid: rng.integers(0, 99, rng.integers(1, 5)).tolist() for _, _, rid in rids}
    bench.step(1, [(rid, 0, given[rid]) for _, _, rid in rids], counts=True)
    for end in ends:
        frame = bench.expect(end, Outputs)
        tokens, got = column(frame.tokens, "<i4"), {}
        for handle, count in zip(column(frame.rids), column(frame.counts, "<u2"), strict=True):
            got[handle], tokens = tokens[:count], tokens[count:]
        assert got == {handle: given[rid] for owner, handle, rid in rids if owner is end}
        assert tokens == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1] * 128}, "128 tokens, the context length is 128"),
        ({"prompt": [1] * 500}, "500 tokens, the context length is 128"),
        ({"prompt": [1, 1000]}, "token id 1000; ids go from 0 to 999"),
        ({"prompt": [-1]}, "token id -1"),
        ({"sampling": Sampling(temperature=-1)}, "temperature must be between 0 and 100, not -1"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature must be"),
        ({"sampling": Sampling(top_p=0)}, "top_p must be above 0"),
        ({"sampling": Sampling(top_p=float("inf"))}, "top_p"),
        ({"sampling": Sampling(top_k=-1)}, "top_k"),
        ({"sampling": Sampling(min_p=2)}, "min_p"),
        ({"sampling": Sampling(max_tokens=0)}, "max_tokens"),
        ({"sampling": Sampling(seed=2**64 - 1), "salt": b"x" * 257}, "salt has 257 bytes"),
        ({"sampling": Sampling(stop_token_ids=(5, 1000))}, "stop_token_ids holds 1000"),
        ({"sampling": Sampling(stop_token_ids=(1,) * 1025)}, "stop_token_ids has 1025 entries"),
        ({"priority": 2**31}, "priority"),
        ({"queue_seconds": -1.0}, "queue_seconds"),
        ({"queue_seconds": float("nan")}, "queue_seconds"),
    ],
)
def test_what_is_wrong_with_a_request_is_named(bench: Any, change: dict[str, Any], words: str) -> None:
    gateway = bench.gateway()
    gateway.generate(5, **change)
    refused = bench.expect(gateway, Refused)
    assert (refused.rid, refused.code) == (5, RefusalCode.INVALID)
    assert words in refused.message
    assert not bench.requests
    bench.submit(gateway, 5)  # the handle is free


@pytest.mark.parametrize("rid", [-1, 2**32])
def test_handles_fit_their_column(bench: Any, rid: int) -> None:
    gateway = bench.gateway()
    gateway.generate(rid)
    assert "rid must be between 0 and 4294967295" in bench.expect(gateway, Refused).message


def test_numbers_beyond_the_model_mean_all(bench: Any) -> None:
    gateway = bench.gateway()
    rid = bench.submit(gateway, 1, sampling=Sampling(top_k=2**62, max_tokens=2**62))
    assert (bench.requests[rid].sampling.top_k, bench.requests[rid].sampling.max_tokens) == (1000, 128)


def test_a_prompt_of_broken_bytes_is_named(bench: Any) -> None:
    gateway = bench.gateway()
    gateway.send(msgspec.msgpack.encode(["Generate", 5, b"\1\0\0\0\2", [1.0]]))
    assert "not a multiple of 4" in bench.expect(gateway, Refused).message


def test_a_handle_in_use_is_refused_without_hurting_its_owner(bench: Any) -> None:
    gateway = bench.gateway()
    rid = bench.submit(gateway, 5)
    gateway.generate(5)
    refused = bench.expect(gateway, Refused)
    assert (refused.rid, refused.code) == (None, RefusalCode.INVALID)
    assert "rid 5 is in use" in refused.message
    bench.step(1, [(rid, 0, [3])])
    assert column(bench.expect(gateway, Outputs).rids) == [5]


def test_an_abort_is_answered_by_a_finish(bench: Any) -> None:
    gateway = bench.gateway()
    rid = bench.submit(gateway, 5)
    gateway.abort(5)
    gateway.abort(5)
    gateway.abort(6)  # unknown: passed over
    bench.until(lambda: rid in bench.aborts)
    bench.server.out.finish([bench.end(rid, FinishReason.ABORT)], 3)
    frame = bench.expect(gateway, Outputs)
    assert (frame.step, frame.rids, frame.finished[0].rid) == (3, b"", 5)
    assert frame.finished[0].reason == FinishReason.ABORT


def test_an_abort_never_hits_the_next_owner_of_an_id(bench: Any) -> None:
    gone, stays = bench.gateway(), bench.gateway()
    first = bench.submit(gone, 1)
    gone.socket.close()
    bench.until(lambda: not bench.server.out.send_to(peer_of(bench, first), b"x"))  # notices; abort is due
    bench.step(1, [(first, 0, [5])], (bench.end(first),))  # but it ended by itself
    assert bench.submit(stays, 2) == first
    bench.pump()
    assert bench.aborts == []


def peer_of(bench: Any, rid: int) -> Any:
    return bench.server.out.peers.at(int(bench.server.out.table.owner[rid]))


def test_a_second_hello_starts_the_connection_anew(bench: Any) -> None:
    gateway = bench.gateway()
    rid = bench.submit(gateway, 5)
    gateway.hello()
    bench.expect(gateway, Welcome)
    assert bench.aborts == [rid]
    bench.step(1, [(rid, 0, [3])], (bench.end(rid),))
    other = bench.submit(gateway, 5)
    bench.step(2, [(other, 0, [4])])
    assert column(bench.expect(gateway, Outputs).tokens) == [4]


def test_the_queue_is_bounded_and_a_part_is_kept_for_each_gateway(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_waiting=8)
    greedy, modest = bench.gateway(), bench.gateway()
    for handle in range(6):  # all but the other's share of 8 / 2 / 2
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


def test_a_burst_in_one_turn_counts_towards_the_bound(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_waiting=3)
    gateway = bench.gateway()
    for handle in range(6):
        gateway.generate(handle)
    refused = bench.server.out.counters.refused

    def answered() -> bool:
        bench.waiting = len(bench.requests)  # as the engine counts them after a turn
        return len(bench.requests) + refused[RefusalCode.QUEUE_FULL] == 6

    bench.until(answered)
    assert len(bench.requests) == 3


def test_waiting_too_long_is_refused_and_frees_the_handle(bench: Any) -> None:
    gateway = bench.gateway()
    late = bench.submit(gateway, 5, queue_seconds=2.0)
    lucky = bench.submit(gateway, 6, queue_seconds=2.0)
    bench.step(1, [(lucky, 0, [1])])
    assert bench.server.next_timeout() == 102.0
    bench.now += 1.9
    bench.pump()
    assert bench.aborts == []
    bench.now += 0.2
    refused = bench.expect(gateway, Refused)
    assert (refused.rid, refused.code) == (5, RefusalCode.QUEUE_TIMEOUT)
    assert "2.1 s" in refused.message
    assert bench.aborts == [late]
    bench.submit(gateway, 5)
    gateway.inbox.clear()
    bench.server.out.finish([bench.end(late, FinishReason.ABORT)], 1)
    bench.step(2, [(lucky, 1, [1])])
    assert bench.expect(gateway, Outputs).finished == ()  # nobody hears of the late one again


def test_queue_deadlines_of_ended_requests_take_no_room(bench: Any) -> None:
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


def test_a_draining_engine_says_so_and_takes_nothing(bench: Any) -> None:
    gateway = bench.gateway()
    rid = bench.submit(gateway, 1)
    bench.server.out.drain()
    bench.server.out.stats(LOAD, 0, bench.now)
    assert bench.expect(gateway, Stats).draining
    gateway.generate(2)
    assert bench.expect(gateway, Refused).code == RefusalCode.DRAINING
    late = bench.gateway(hello=False)
    late.hello()
    assert bench.expect(late, Welcome).draining
    bench.step(1, [(rid, 0, [1])], (bench.end(rid),))
    assert bench.expect(gateway, Outputs).finished[0].rid == 1


def test_stats_come_on_change_and_every_second(bench: Any) -> None:
    gateway = bench.gateway()

    def came(load: Load, steps: int) -> bool:
        bench.server.out.stats(load, steps, bench.now)
        gateway.send(FetchFile("x"))
        bench.expect(gateway, Refused)  # frames keep their order: what came was sent before it
        return gateway.take(Stats) is not None

    assert came(LOAD, 1)
    bench.now += 0.5
    assert not came(LOAD, 2)  # a step alone is no change
    other = Load(running=2, waiting=2, waiting_tokens=3, pages_total=4, pages_used=5, pages_cached=6)
    assert came(other, 2)
    bench.now += 0.001
    assert not came(LOAD, 2)  # too soon after the last
    bench.now += 1.1
    assert came(other, 3)


def test_files_come_in_parts(make_bench: Callable[..., Any]) -> None:
    content = bytes(range(256)) * (FILE_PART_BYTES // 256) + b"the rest"
    bench = make_bench(files={"tokenizer.json": content, "empty": b""})
    gateway = bench.gateway()
    got = b""
    while len(got) < len(content):
        gateway.send(FetchFile("tokenizer.json", len(got)))
        part = bench.expect(gateway, File)
        assert (part.name, part.offset, part.size) == ("tokenizer.json", len(got), len(content))
        got += part.content
    assert got == content
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
def test_no_other_file_and_no_other_offset(make_bench: Callable[..., Any], name: str, offset: int) -> None:
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

    def heard() -> bool:
        bench.now += 1.1
        bench.server.out.stats(LOAD, 0, bench.now)
        return len(bench.server.out.peers) == 1

    bench.until(heard)
    third.hello()
    bench.expect(third, Welcome)


def test_a_taken_port_is_a_clear_error(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    with pytest.raises(ValueError, match="cannot listen on tcp:"):
        make_bench(endpoint=bench.server.endpoint)


def test_closing_delivers_what_was_sent(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(linger_seconds=2.0)
    gateway = bench.gateway()
    rid = bench.submit(gateway, 5)
    bench.step(1, [(rid, 0, [1])], (bench.end(rid),))
    bench.server.close()
    assert gateway.read(2)
    while gateway.read(0.1):
        pass
    assert any(isinstance(message, Outputs) for message in gateway.inbox)


def test_a_server_is_a_router_that_never_drops_silently(bench: Any) -> None:
    server: WireServer = bench.server
    [(_, socket)] = server._doors
    assert socket.type == zmq.ROUTER
    assert socket.sndhwm == 1000
