# SPDX-License-Identifier: Apache-2.0
"""The gateway as a process: signals, drain, failed starts and engine keys."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import psutil
import pytest

from mizzen.gateway.grpc import inference_pb2 as pb
from mizzen.wire.curve_keys import KeyFolder, write_keys
from mizzen.wire.messages import PROTOCOL
from ports import free_ports

PROGRAM = """
import json, sys
from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.main import run
options = json.loads(sys.argv[1])
sys.exit(run(GatewayConfig(**{**options, "engine": tuple(options.get("engine", ()))})))
"""


class Process:
    """A gateway that runs as a process."""

    def __init__(self, **options: Any) -> None:
        self.port, self.admin = free_ports(), free_ports()
        options = {"served_name": "demo", "port": self.port, "admin_port": self.admin, **options}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(options)], stderr=subprocess.PIPE, text=True
        )

    def ready(self, path: str = "/readyz") -> int:
        try:
            return httpx.get(f"http://127.0.0.1:{self.admin}{path}", timeout=30).status_code
        except httpx.HTTPError:
            return 0

    def wait_ready(self, status: int = 200) -> None:
        deadline = time.monotonic() + 60
        while self.ready() != status:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def stream(self) -> Any:
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="x", max_retries=0, timeout=60
        )
        return client.completions.create(model="demo", prompt=[1, 2], max_tokens=60, stream=True)

    def takes(self) -> bool:
        """Return whether the gateway accepts a new connection and answers a request on it."""
        try:
            self.stream().close()
        except openai.APIConnectionError:
            return False
        return True


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    running: list[Process] = []

    def begin(**options: Any) -> Process:
        running.append(Process(**options))
        return running[-1]

    yield begin
    for process in running:
        process.process.kill()
        process.process.communicate()


def test_sigterm_lets_streams_end(scripted: Any, start: Any) -> None:
    engine = scripted()
    engine.does.step_seconds = 0.5  # so slow that the stream lasts until the step time is lowered below
    gateway = start(engine=[engine.endpoint])
    gateway.wait_ready()
    chunks = iter(gateway.stream())
    next(chunks)
    gateway.process.send_signal(signal.SIGTERM)
    gateway.wait_ready(503)
    assert gateway.ready("/healthz") == 200
    deadline = time.monotonic() + 10  # before the stream ends
    while gateway.takes():  # the gateway is unready before it stops listening
        assert time.monotonic() < deadline
    engine.does.step_seconds = 0.001
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert gateway.process.wait(60) == 0


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_lets_grpc_calls_end(processes: int, scripted: Any, start: Any) -> None:
    engine = scripted()
    engine.does.reply, engine.does.step_seconds = [10] * 60, 0.5
    port = free_ports()
    gateway = start(engine=[engine.endpoint], grpc_port=port, processes=processes)
    gateway.wait_ready()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        generate = channel.unary_stream(
            "/mizzen.inference.v1.Inference/Generate",
            pb.GenerateRequest.SerializeToString,
            pb.GenerateResponse.FromString,
        )
        request = pb.GenerateRequest(
            model="demo", prompt_token_ids=[1], sampling=pb.SamplingParams(max_tokens=60)
        )
        responses = generate(request, timeout=60, wait_for_ready=True)
        count = len(next(responses).token_ids)
        gateway.process.send_signal(signal.SIGTERM)
        gateway.wait_ready(503)
        engine.does.step_seconds = 0.001
        assert count + sum(len(response.token_ids) for response in responses) == 60
    assert gateway.process.wait(60) == 0


def test_a_grpc_port_in_use_is_named(scripted: Any, start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gateway = start(engine=[scripted().endpoint], grpc_port=taken.getsockname()[1])
        assert gateway.process.wait(60) == 1
    assert "--grpc-port" in gateway.process.stderr.read()


def own_address() -> str:
    """Return an IPv4 address of this machine that is not a loopback address."""
    addresses = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    found = [text for text in addresses if text.count(".") == 3 and not text.startswith("127.")]
    if not found:
        pytest.skip("this machine has only a loopback address")
    return found[0]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_api_of_a_pods_address_is_on_the_loopback_address_too(
    processes: int, scripted: Any, start: Any
) -> None:
    """`kubectl port-forward` connects to the loopback address of the pod."""
    address = own_address()
    gateway = start(engine=[scripted().endpoint], host=address, processes=processes)
    gateway.wait_ready()
    for host in (address, "127.0.0.1"):
        answer = httpx.get(f"http://{host}:{gateway.port}/v1/models", timeout=30, trust_env=False)
        assert answer.status_code == 200
    gateway.process.send_signal(signal.SIGTERM)
    assert gateway.process.wait(60) == 0


def test_the_loopback_listener_can_be_turned_off(scripted: Any, start: Any) -> None:
    address = own_address()
    gateway = start(engine=[scripted().endpoint], host=address, loopback=False)
    gateway.wait_ready()
    url = f"http://{address}:{gateway.port}/v1/models"
    assert httpx.get(url, timeout=30, trust_env=False).status_code == 200
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", gateway.port), timeout=5)
    gateway.process.send_signal(signal.SIGTERM)
    assert gateway.process.wait(60) == 0


def test_a_loopback_port_in_use_does_not_stop_the_gateway(scripted: Any, start: Any) -> None:
    address, port = own_address(), free_ports()
    with socket.create_server(("127.0.0.1", port)):
        gateway = start(engine=[scripted().endpoint], host=address, port=port)
        gateway.wait_ready()
        answer = httpx.get(f"http://{address}:{port}/v1/models", timeout=30, trust_env=False)
        assert answer.status_code == 200
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(60) == 0


def send_until_close(port: int, answered: threading.Event) -> str:
    """Send requests over one connection until the gateway closes it; return how the connection ended."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    connection.auto_open = 0  # type: ignore[assignment]
    try:
        while True:
            connection.request("GET", "/v1/models")
            response = connection.getresponse()
            response.read()
            if response.getheader("connection") == "close":
                return "closed"
            answered.set()
            time.sleep(random.uniform(0, 0.02))
    except (OSError, http.client.HTTPException) as error:
        return f"lost a request: {error!r}"


def test_sigterm_loses_no_request_on_a_keep_alive_connection(scripted: Any, start: Any) -> None:
    gateway = start(engine=[scripted().endpoint])
    gateway.wait_ready()
    answered = [threading.Event() for _ in range(40)]
    with concurrent.futures.ThreadPoolExecutor(len(answered)) as pool:
        ends = [pool.submit(send_until_close, gateway.port, event) for event in answered]
        assert all(event.wait(60) for event in answered)
        gateway.process.send_signal(signal.SIGTERM)
        assert {end.result(60) for end in ends} == {"closed"}
    assert gateway.process.wait(60) == 0


def test_drain_timeout_ends_streams_with_an_error(scripted: Any, start: Any) -> None:
    engine = scripted()
    engine.does.step_seconds = 0.5
    gateway = start(engine=[engine.endpoint], drain_timeout_seconds=0.5)
    gateway.wait_ready()
    chunks = iter(gateway.stream())
    next(chunks)
    gateway.process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="was interrupted"):
        list(chunks)
    assert gateway.process.wait(60) == 0


def test_second_signal_ends_the_process_despite_slow_clients(start: Any) -> None:
    gateway = start(engine=["tcp://127.0.0.1:1"], drain_timeout_seconds=60)
    gateway.wait_ready()
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n"
        )
        client.sendall(head)
        assert client.recv(12) == b"HTTP/1.1 100"  # the gateway now waits for the body
        gateway.process.send_signal(signal.SIGTERM)
        gateway.wait_ready(503)
        assert gateway.process.poll() is None
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(60) == 0


def test_failed_start_reports_its_reason(start: Any, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = [
            start(engine=["tcp://127.0.0.1:1"], port=taken.getsockname()[1]),
            start(engine=["tcp://10.1.2.3:1"]),
            start(engine=["tcp://127.0.0.1:1"], keys=str(tmp_path)),
            start(engine=["tcp://127.0.0.1:1"], admin_token_file=str(tmp_path / "none")),
        ]
        texts = [case.process.communicate(timeout=60)[1] for case in cases]
        assert [case.process.returncode for case in cases] == [1] * 4
    for text, expected in zip(
        texts, ("in use", "needs CURVE keys", "gateway.public", "--admin-token-file"), strict=True
    ):
        assert expected in text


def test_engine_connections_use_the_configured_keys(start: Any, tmp_path: Path, model_folder: Path) -> None:
    """The connection to an engine is encrypted by CURVE; a gateway with other keys cannot connect."""
    from mizzen.wire.messages import Welcome
    from mizzen.wire.server.engine_server import WireServer

    write_keys(tmp_path / "keys")
    write_keys(tmp_path / "other")
    welcome = Welcome(PROTOCOL, "e", "i", "r", "demo", "h", {}, 128, 512, (), 16, 4, False)
    server = WireServer(
        "tcp://127.0.0.1:*", KeyFolder(tmp_path / "keys", "engine"), welcome, {}, max_waiting=4
    )
    good = start(engine=[server.endpoint], keys=str(tmp_path / "keys"))
    bad = start(engine=[server.endpoint], keys=str(tmp_path / "other"))
    deadline = time.monotonic() + 60
    while not (len(server.out.peers) == 1 and good.ready() == 200 and bad.ready() == 200):
        assert time.monotonic() < deadline
        server.receive(time.monotonic(), 0)
        time.sleep(0.02)
    for _ in range(20):
        server.receive(time.monotonic(), 0)
        time.sleep(0.02)
    assert len(server.out.peers) == 1
    server.close()


def test_gateway_is_ready_while_all_engines_have_another_protocol(
    scripted: Any, start: Any, tmp_path: Path
) -> None:
    """During an upgrade that changes the protocol, requests wait for compatible engines.

    A request that waits too long gets 503.
    """
    (tmp_path / "token").write_text("s3cret")
    engines = [scripted(protocol=PROTOCOL + 1).endpoint, f"tcp://127.0.0.1:{free_ports()}"]
    gateway = start(
        engine=engines,
        admin_token_file=str(tmp_path / "token"),
        queue_timeout_seconds=1.0,
        resume_wait_seconds=60.0,
    )
    gateway.wait_ready()

    def first() -> Any:
        url, headers = f"http://127.0.0.1:{gateway.admin}/admin/engines", {"authorization": "Bearer s3cret"}
        table = httpx.get(url, headers=headers, timeout=30).json()
        return next(engine for engine in table["engines"] if engine["name"] == engines[0])

    deadline = time.monotonic() + 60
    while first()["state"] != "broken":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert f"speaks version {PROTOCOL + 1} of the wire protocol, this gateway versions" in first()["problem"]
    assert gateway.ready() == 200
    with pytest.raises(openai.InternalServerError) as refused:
        gateway.stream()
    assert refused.value.status_code == 503
    scripted(endpoint=engines[1])  # an engine with the gateway's protocol has started
    deadline = time.monotonic() + 60
    while True:
        try:
            chunks = list(gateway.stream())
            break
        except openai.InternalServerError:
            assert time.monotonic() < deadline
    assert chunks[-1].choices[0].finish_reason == "length"
