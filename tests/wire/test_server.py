# SPDX-License-Identifier: Apache-2.0
"""The engine's server: handshake, validation of requests, and delivery of outputs to gateways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from frames import LOAD, column

from mizzen.core.outputs import CacheEvents
from mizzen.core.request import FinishReason
from mizzen.core.sampling_params import SamplingParams
from mizzen.wire.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    Blocks,
    Hello,
    Outputs,
    RefusalCode,
    Refused,
    Sampling,
    Stats,
    Welcome,
)


def test_hello_is_answered_with_welcome_stats_and_blocks(bench: Any) -> None:
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


def test_silence_limit_is_withdrawn_immediately_and_once(bench: Any) -> None:
    gateway = bench.gateway()
    bench.server.out.stats(LOAD, 7, bench.now, patience=0.5)
    bench.server.out.withdraw_silence_limit()
    bench.server.out.withdraw_silence_limit()
    bench.server.out.stats(LOAD, 8, bench.now + 5.0)
    stats = [bench.expect(gateway, Stats) for _ in range(3)]
    assert [(message.steps, message.patience_seconds) for message in stats] == [(7, 0.5), (7, 0.0), (8, 0.0)]


def test_request_carries_its_tenant_and_a_busy_end_becomes_a_refusal(bench: Any) -> None:
    gateway = bench.gateway()
    rid = bench.submit(gateway, 7, tenant=2**63 - 1)
    assert bench.requests[rid].tenant == 2**63 - 1
    rejected = msgspec.structs.replace(bench.end(rid), busy=True, message="grammar: too many")
    bench.server.out.finish([rejected], 1)
    refused = bench.expect(gateway, Refused)
    assert (refused.rid, refused.code, refused.message) == (7, RefusalCode.BUSY, "grammar: too many")
    assert refused.retry_after_seconds > 0
    bench.requests.clear()
    bench.submit(gateway, 7)  # the handle is free again


def test_rejection_of_another_protocol_names_both_versions(bench: Any) -> None:
    gateway = bench.gateway(hello=False)
    gateway.send(Hello(99, "old"))
    refused = bench.expect(gateway, Refused)
    assert (refused.rid, refused.code) == (None, RefusalCode.INVALID)
    assert refused.message == (
        "Hello.protocol: the gateway speaks version 99 of the wire protocol, "
        f"this engine versions {OLDEST_PROTOCOL} to {PROTOCOL}; upgrade the engine"
    )
    gateway.generate(5)
    assert bench.expect(gateway, Refused).code == RefusalCode.UNKNOWN_PEER


def test_gateway_with_another_protocol_is_logged_once_and_counted_each_time(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A gateway with another protocol keeps trying, each time with a new connection."""

    def logged_fields() -> list[dict[str, Any]]:
        return [vars(record)["fields"] for record in caplog.records if "another protocol" in record.message]

    for name, protocol in (("a", 99), ("a", 99), ("b", 99), ("a", 98), ("b", 99)):
        gateway = bench.gateway(hello=False)
        gateway.send(Hello(protocol, name))
        bench.expect(gateway, Refused)
    assert logged_fields() == [
        {"gateway": name, "protocol": protocol, "spoken": PROTOCOL}
        for name, protocol in (("a", 99), ("b", 99), ("a", 98))
    ]
    assert bench.server.out.counters.other_protocol == 5
    for number in range(200):  # the server remembers a bounded number of gateways and protocols
        gateway.send(Hello(number + 100, "a"))
        bench.expect(gateway, Refused)
    gateway.send(Hello(99, "b"))
    bench.expect(gateway, Refused)
    assert len(logged_fields()) == 204


def test_messages_before_hello_are_rejected(bench: Any) -> None:
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


def test_seed_is_drawn_if_none_is_given(bench: Any) -> None:
    gateway = bench.gateway()
    rids = [bench.submit(gateway, handle) for handle in range(4)]
    seeds = {bench.requests[rid].seed for rid in rids}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_streams_are_numbered_and_finish_once(bench: Any) -> None:
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
    reused_rid = bench.submit(gateway, 1000)  # the handle is free again
    assert reused_rid == first  # the engine's id is free, too
    assert bench.aborts == []


def test_gateways_receive_only_their_own_rows(bench: Any) -> None:
    first, second = bench.gateway(), bench.gateway()
    rids = [bench.submit(gateway, handle) for handle in (7, 8) for gateway in (first, second)]
    bench.step(1, [(rid, 0, [100 + i]) for i, rid in enumerate(rids)], (bench.end(rids[3]),))
    frames = [bench.expect(gateway, Outputs) for gateway in (first, second)]
    assert [column(frame.rids) for frame in frames] == [[7, 8], [7, 8]]
    assert [column(frame.tokens) for frame in frames] == [[100, 102], [101, 103]]
    assert [[end.rid for end in frame.finished] for frame in frames] == [[], [8]]


@pytest.mark.parametrize("gateways", [1, 3])
def test_rows_with_several_tokens_are_split_by_counts(make_bench: Callable[..., Any], gateways: int) -> None:
    bench = make_bench()
    ends = [bench.gateway() for _ in range(gateways)]
    rng = np.random.default_rng(gateways)
    rids = [(end, handle, bench.submit(end, handle)) for handle in range(5) for end in ends]
    expected = {rid: rng.integers(0, 99, rng.integers(1, 5)).tolist() for _, _, rid in rids}
    bench.step(1, [(rid, 0, expected[rid]) for _, _, rid in rids], counts=True)
    for end in ends:
        frame = bench.expect(end, Outputs)
        tokens, received = column(frame.tokens, "<i4"), {}
        for handle, count in zip(column(frame.rids), column(frame.counts, "<u2"), strict=True):
            received[handle], tokens = tokens[:count], tokens[count:]
        assert received == {handle: expected[rid] for owner, handle, rid in rids if owner is end}
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
def test_rejection_names_the_invalid_field(bench: Any, change: dict[str, Any], words: str) -> None:
    gateway = bench.gateway()
    gateway.generate(5, **change)
    refused = bench.expect(gateway, Refused)
    assert (refused.rid, refused.code) == (5, RefusalCode.INVALID)
    assert words in refused.message
    assert not bench.requests
    bench.submit(gateway, 5)  # the handle is free


@pytest.mark.parametrize("rid", [-1, 2**32])
def test_handles_outside_32_bits_are_rejected(bench: Any, rid: int) -> None:
    gateway = bench.gateway()
    gateway.generate(rid)
    assert "rid must be between 0 and 4294967295" in bench.expect(gateway, Refused).message


def test_values_beyond_the_models_limits_are_clamped(bench: Any) -> None:
    gateway = bench.gateway()
    rid = bench.submit(gateway, 1, sampling=Sampling(top_k=2**62, max_tokens=2**62))
    assert (bench.requests[rid].sampling.top_k, bench.requests[rid].sampling.max_tokens) == (1000, 128)


def test_prompt_of_a_wrong_byte_length_is_rejected(bench: Any) -> None:
    gateway = bench.gateway()
    gateway.send(msgspec.msgpack.encode(["Generate", 5, b"\1\0\0\0\2", [1.0]]))
    assert "not a multiple of 4" in bench.expect(gateway, Refused).message
