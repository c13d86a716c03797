# SPDX-License-Identifier: Apache-2.0
"""Plans sent over TCP to ranks on other nodes arrive in order, or the channel fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from mizzen.core.step_plan import PageWrites, PrefillChunk, StepPlan
from mizzen.wire.curve_keys import load_ring, write_keys
from mizzen.wire.endpoint import UnsafeEndpoint
from mizzen.wire.ranks.plan_ring import PlanChannelStalled
from mizzen.wire.ranks.plan_tcp import PlanChannelBroken, PlanClient, PlanServer

SECONDS = 60.0
LOCAL = "tcp://127.0.0.1:*"
READ = """
import sys
from pathlib import Path
from mizzen.wire.curve_keys import load_ring
from mizzen.wire.ranks.plan_tcp import PlanClient
client = PlanClient(sys.argv[1], load_ring(Path(sys.argv[2]), "engine").own[0], int(sys.argv[3]))
while not client.ended:
    plan = client.receive(60)
    if plan is not None:
        print(plan.step, sum(len(chunk.tokens) for chunk in plan.prefill))
client.close()
"""


Register = Callable[[Any], Any]
"""Function that registers a `PlanServer` or `PlanClient` to be closed, and returns it."""


@pytest.fixture
def close_later() -> Iterator[Register]:
    """Close the registered servers and clients even if the test fails.

    A server or client that is still open could hang forever when it is garbage-collected.
    """
    ends: list[Any] = []

    def register(end: Any) -> Any:
        ends.append(end)
        return end

    yield register
    for end in ends:
        # `Context.destroy` would also close the socket of the allow-list's thread, which aborts the process.
        end._socket.close(linger=0)
        end._context.term()


def plan(step: int, tokens: int = 0) -> StepPlan:
    chunk = PrefillChunk(slot=1, start=0, tokens=np.arange(tokens, dtype=np.int32), last=True)
    return StepPlan(
        step=step,
        decode=np.arange(step % 7, dtype=np.int32),
        decode_version=step,
        pages=PageWrites(),
        prefill=(chunk,) if tokens else (),
    )


def test_two_processes_receive_every_plan(tmp_path: Path) -> None:
    write_keys(tmp_path)
    server = PlanServer(LOCAL, load_ring(tmp_path, "engine").own[0], ranks=[1, 2], timeout_seconds=SECONDS)
    words = [sys.executable, "-c", READ, server.endpoint, str(tmp_path)]
    readers = [subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, text=True) for rank in (1, 2)]
    try:
        server.wait(SECONDS)
        for step in range(1, 300):
            server.send(plan(step, step))
        server.end()
        outputs = [reader.communicate(timeout=SECONDS)[0].split() for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
        server.close()
    assert outputs == [[word for step in range(1, 300) for word in (str(step), str(step))]] * 2


def test_client_without_the_engines_keys_is_rejected(tmp_path: Path, close_later: Register) -> None:
    engine_keys, client_keys = tmp_path / "ours", tmp_path / "theirs"
    for folder in (engine_keys, client_keys):
        folder.mkdir()
        write_keys(folder)
    keys = load_ring(engine_keys, "engine").own[0]
    server = close_later(PlanServer(LOCAL, keys, ranks=[1]))
    for folder, side in ((client_keys, "engine"), (engine_keys, "gateway")):
        close_later(PlanClient(server.endpoint, load_ring(folder, side).own[0], 1))
    with pytest.raises(PlanChannelStalled, match=r"rank1 did not connect within 0\.5 s"):
        server.wait(0.5)
    member = close_later(PlanClient(server.endpoint, keys, 1))
    server.wait(SECONDS)
    server.send(plan(1))
    received = member.receive(SECONDS)
    assert received is not None
    assert received.step == 1


def test_endpoints_on_other_machines_need_keys() -> None:
    with pytest.raises(UnsafeEndpoint):
        PlanServer("tcp://0.0.0.0:*", None, ranks=[1])
    with pytest.raises(UnsafeEndpoint):
        PlanClient("tcp://192.0.2.1:5558", None, 1)


def test_lost_plan_breaks_the_channel(close_later: Register) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind("tcp://127.0.0.1:*")
    client = close_later(PlanClient(socket.get_string(zmq.LAST_ENDPOINT), None, 3))
    name, _ = socket.recv_multipart()
    assert name == b"rank3"
    socket.send_multipart((name, (2).to_bytes(8, "little")))
    with pytest.raises(PlanChannelBroken, match="received plan 2, expected plan 1"):
        client.receive(SECONDS)
    context.destroy(linger=0)


def test_lost_or_reconnected_rank_is_reported(close_later: Register) -> None:
    server = close_later(PlanServer(LOCAL, None, ranks=[1], timeout_seconds=SECONDS))
    client = close_later(PlanClient(server.endpoint, None, 1))
    server.wait(SECONDS)
    client.close()
    with pytest.raises(PlanChannelBroken, match="rank1 is gone"):
        for step in range(1, 1_000_000):
            server.send(plan(step))
    second_client = close_later(PlanClient(server.endpoint, None, 1))
    server.wait(SECONDS)
    second_client._socket.send(b"here")
    assert server._socket.poll(int(SECONDS * 1000))
    with pytest.raises(PlanChannelBroken, match="reconnected"):
        server.send(plan(1))


def test_rank_that_does_not_read_stalls_the_channel(close_later: Register) -> None:
    server = close_later(PlanServer(LOCAL, None, ranks=[1], timeout_seconds=0.3))
    close_later(PlanClient(server.endpoint, None, 1))
    server.wait(SECONDS)
    with pytest.raises(PlanChannelStalled, match=r"rank1 has read no plan for 0\.3 s"):
        for step in range(1, 1_000_000):
            server.send(plan(step, 50_000))
