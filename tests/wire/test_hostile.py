# SPDX-License-Identifier: Apache-2.0
"""Malformed messages, wrong keys, silent and slow gateways: none of them affects other gateways."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mizzen.core.outputs import Load
from mizzen.wire.codec import encode
from mizzen.wire.curve_keys import KeyFileError, WireKeys, load_ring, write_keys
from mizzen.wire.endpoint import UnsafeEndpoint, is_local, require_safe
from mizzen.wire.messages import (
    PROTOCOL,
    Abort,
    FetchFile,
    Generate,
    Hello,
    Outputs,
    RefusalCode,
    Refused,
    Sampling,
    Welcome,
)

LOAD = Load(running=0, waiting=0, waiting_tokens=0, pages_total=1, pages_used=0, pages_cached=0)

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
TAGS = st.sampled_from(
    ["Hello", "Generate", "Embed", "Abort", "FetchFile", "Welcome", "Outputs", "Embedding"]
)


def tagged(call: tuple[str, list[Any]]) -> bytes:
    return msgspec.msgpack.encode([call[0], *call[1]])


FRAMES = st.one_of(
    st.binary(max_size=200),
    ANYTHING.map(msgspec.msgpack.encode),
    st.tuples(TAGS, st.lists(ANYTHING, max_size=8)).map(tagged),
)


class TestGarbage:
    @settings(
        max_examples=40,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(frames=st.lists(st.lists(FRAMES, min_size=1, max_size=3), min_size=1, max_size=20))
    def test_malformed_frames_do_not_stop_the_engine(self, bench: Any, frames: list[list[bytes]]) -> None:
        gateway = bench.gateway(hello=False)
        for message_parts in frames:
            gateway.socket.send_multipart(message_parts)
        gateway.hello()
        bench.expect(gateway, Welcome)
        gateway.socket.close()
        bench.now += 2
        bench.server.out.stats(LOAD, 0, bench.now)  # the send fails, so the server notices the disconnect

    def test_damaged_frames_are_counted_and_answered(self, bench: Any) -> None:
        gateway = bench.gateway()
        rng = random.Random(7)
        good = encode(Generate(5, b"\1\0\0\0", Sampling(stop_token_ids=(1, 2))))
        frames_sent = 300
        for _ in range(frames_sent):
            frame = bytearray(good[: rng.randrange(1, len(good) + 1)])
            for _ in range(3):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            gateway.send(bytes(frame))
        gateway.send(FetchFile("the last"))
        bench.until(lambda: any("the last" in message.message for message in refusals(gateway)))
        refused = len(refusals(gateway)) - 1
        counters = bench.server.out.counters
        assert counters.malformed > 100
        assert sum(counters.refused.values()) == refused + 1
        assert (
            refused + counters.accepted >= frames_sent - 20
        )  # a few damaged frames may be a valid Abort or Hello

    def test_flood_of_one_gateway_leaves_room_for_others(self, bench: Any) -> None:
        flood, modest = bench.gateway(), bench.gateway()
        for _ in range(900):
            flood.send(b"garbage")
        assert bench.submit(modest, 1) is not None
        flood.drain()
        assert len(bench.server.out.peers) == 2


def refusals(gateway: Any) -> list[Refused]:
    gateway.drain()
    return [message for message in gateway.inbox if isinstance(message, Refused)]


class TestKeys:
    @pytest.fixture
    def keys(self, tmp_path: Path) -> tuple[WireKeys, WireKeys]:
        write_keys(tmp_path / "keys")
        engine, gateway = (load_ring(tmp_path / "keys", side) for side in ("engine", "gateway"))
        (engine_keys,), (gateway_keys,) = engine.own, gateway.own
        return WireKeys(engine_keys.public, engine_keys.secret, *engine.peers), WireKeys(
            gateway_keys.public, gateway_keys.secret, *gateway.peers
        )

    def test_client_with_the_right_keys_is_served(
        self, make_bench: Callable[..., Any], keys: tuple[WireKeys, WireKeys]
    ) -> None:
        bench = make_bench(keys=keys[0])
        gateway = bench.gateway(keys=keys[1])
        bench.submit(gateway, 1)

    def test_client_with_a_wrong_key_receives_nothing(
        self, make_bench: Callable[..., Any], keys: tuple[WireKeys, WireKeys]
    ) -> None:
        bench = make_bench(keys=keys[0])
        public, secret = zmq.curve_keypair()
        unrelated = bench.gateway(keys=WireKeys(public, secret, keys[0].public), hello=False)
        without_keys = bench.gateway(hello=False)
        with_wrong_server_key = bench.gateway(
            keys=WireKeys(keys[1].public, keys[1].secret, public), hello=False
        )
        for gateway in (unrelated, without_keys, with_wrong_server_key):
            gateway.hello()
        for _ in range(30):
            bench.pump()
        assert not any(gateway.read(0.02) for gateway in (unrelated, without_keys, with_wrong_server_key))
        assert not bench.server.out.peers
        bench.submit(bench.gateway(keys=keys[1]), 1)  # a gateway with the right keys is served

    def test_endpoint_reachable_from_other_machines_needs_keys(self, make_bench: Callable[..., Any]) -> None:
        with pytest.raises(UnsafeEndpoint) as error:
            make_bench(endpoint="tcp://0.0.0.0:5557")
        assert str(error.value) == (
            "tcp://0.0.0.0:5557 can be reached from other machines and needs CURVE keys: give --keys FOLDER, "
            "or use tcp://127.0.0.1:PORT, ipc:// or inproc://"
        )

    @pytest.mark.parametrize(
        ("endpoint", "local"),
        [
            ("tcp://127.0.0.1:5557", True),
            ("tcp://127.97.3.2:*", True),
            ("tcp://localhost:1", True),
            ("tcp://[::1]:5557", True),
            ("ipc:///tmp/x", True),
            ("inproc://x", True),
            ("tcp://*:5557", False),
            ("tcp://10.0.0.1:5557", False),
            ("tcp://eth0:5557", False),
            ("tcp://[::]:5557", False),
            ("tcp://engine.example:5557", False),
        ],
    )
    def test_is_local_recognises_local_endpoints(
        self, endpoint: str, local: bool, keys: tuple[WireKeys, WireKeys]
    ) -> None:
        assert is_local(endpoint) is local
        require_safe(endpoint, keys[0])

    @pytest.mark.parametrize("endpoint", ["", "5557", "tcp://", "tcp://host", "tcp://host:port", "udp://h:1"])
    def test_malformed_endpoint_error_shows_the_right_form(self, endpoint: str) -> None:
        with pytest.raises(ValueError, match="use tcp://HOST:PORT"):
            is_local(endpoint)

    def test_error_names_the_key_file(self, tmp_path: Path) -> None:
        write_keys(tmp_path)
        (tmp_path / "gateway.public").write_text("short")
        with pytest.raises(KeyFileError, match=r"gateway\.public contains 5 characters"):
            load_ring(tmp_path, "engine")
        (tmp_path / "gateway.public").write_text("~" * 40)
        with pytest.raises(KeyFileError, match=r"gateway\.public contains characters outside Z85"):
            load_ring(tmp_path, "engine")
        (tmp_path / "gateway.public").unlink()
        with pytest.raises(KeyFileError, match=r"cannot read the key file .*gateway\.public"):
            load_ring(tmp_path, "engine")

    def test_the_secret_key_stays_out_of_logs(self, keys: tuple[WireKeys, WireKeys]) -> None:
        assert keys[0].secret.decode() not in repr(keys[0])


class TestLostPeers:
    def test_disconnected_gateway_has_its_requests_aborted(self, bench: Any) -> None:
        closing, staying = bench.gateway(), bench.gateway()
        rids = [bench.submit(closing, handle) for handle in range(3)]
        staying_rid = bench.submit(staying, 0)
        closing.socket.close()
        number = iter(range(1, 10_000))

        def step() -> bool:
            bench.step(next(number), [(rid, 0, [1]) for rid in [*rids, staying_rid]])
            return sorted(bench.aborts) == sorted(rids)

        bench.until(step)
        assert bench.server.out.counters.lost_peers == 1
        frame = bench.expect(staying, Outputs)
        assert len(frame.rids) == 4

    def test_gateway_that_does_not_read_is_dropped_and_notified(self, make_bench: Callable[..., Any]) -> None:
        bench = make_bench(send_frames=10)
        slow, quick = bench.gateway(), bench.gateway()
        slow.socket.rcvhwm = 10
        slow_rid, quick_rid = bench.submit(slow, 1), bench.submit(quick, 2)
        for number in range(1, 400):
            bench.step(number, [(slow_rid, number, [7] * 60_000), (quick_rid, number, [7])], counts=True)
            quick.drain()
            quick.inbox.clear()
            bench.pump()
            if bench.aborts:
                break
        assert bench.aborts == [slow_rid]
        assert len(bench.server.out.peers) == 1
        bench.server.out.finish([bench.end(slow_rid)], 400)
        del bench.requests[slow_rid]

        def is_notified() -> bool:
            bench.now += 2
            bench.server.out.stats(LOAD, 0, bench.now)
            return any(message.code == RefusalCode.UNKNOWN_PEER for message in refusals(slow))

        bench.until(is_notified)
        slow.hello()
        bench.expect(slow, Welcome)
        bench.submit(slow, 1)

    def test_frozen_gateway_is_detected_by_heartbeats(self, make_bench: Callable[..., Any]) -> None:
        bench = make_bench(heartbeat_seconds=0.1, heartbeat_timeout_seconds=0.4)
        code = (
            "import sys, os, signal, time, zmq\n"
            "from mizzen.wire.codec import encode\n"
            "from mizzen.wire.messages import *\n"
            "d = zmq.Context().socket(zmq.DEALER); d.connect(sys.argv[1])\n"
            "d.send(encode(Hello(PROTOCOL, 'frozen')))\n"
            "d.send(encode(Generate(3, b'\\1\\0\\0\\0', Sampling())))\n"
            "d.recv(); os.kill(os.getpid(), signal.SIGSTOP)\n"
        )
        frozen = subprocess.Popen([sys.executable, "-c", code, bench.server.endpoint])
        try:
            bench.until(lambda: len(bench.requests) == 1)

            def is_detected() -> bool:
                bench.now += 1.1
                bench.server.out.stats(LOAD, 0, bench.now)
                return bool(bench.aborts)

            bench.until(is_detected)
            assert not bench.server.out.peers
        finally:
            frozen.kill()
            frozen.wait(60)

    def test_an_oversized_frame_costs_only_its_sender(self, bench: Any) -> None:
        big, modest = bench.gateway(), bench.gateway()
        big.send(b"x" * (2 << 20))
        bench.submit(modest, 1)
        big.send(Abort(1))
        assert bench.server.out.counters.malformed == 0


class TestFetch:
    def test_long_gateway_names_are_cut(self, bench: Any) -> None:
        gateway = bench.gateway(hello=False)
        gateway.send(Hello(PROTOCOL, "x" * 100_000))
        bench.expect(gateway, Welcome)
        (peer,) = bench.server.out.peers
        assert len(peer.name) == 128
