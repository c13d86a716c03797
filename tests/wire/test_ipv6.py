# SPDX-License-Identifier: Apache-2.0
"""Engines, ranks and fetch Jobs listen on the IPv6 address of their pod, as Kubernetes writes it."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
import zmq
from prometheus_client import CollectorRegistry

from mizzen.fetch.progress import FetchProgress
from mizzen.fetch.report import serve_progress
from mizzen.server.http import Health, HttpServer, Routes
from mizzen.wire.endpoint import bracket_host, is_local, use_address_family

NAME = "ip6-localhost"


def has_ipv6_name() -> bool:
    """Return whether this machine resolves `NAME`; the C library's resolver cannot be replaced by a test."""
    try:
        return bool(socket.getaddrinfo(NAME, 1, socket.AF_INET6))
    except OSError:
        return False


@pytest.mark.parametrize(
    ("endpoint", "bracketed"),
    [
        ("tcp://fd00::1:5557", "tcp://[fd00::1]:5557"),
        ("tcp://::1:*", "tcp://[::1]:*"),
        ("tcp://[fd00::1]:5557", "tcp://[fd00::1]:5557"),
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5557"),
        ("tcp://leader.demo.svc:5557", "tcp://leader.demo.svc:5557"),
        ("ipc:///tmp/a:b:c", "ipc:///tmp/a:b:c"),
    ],
)
def test_an_ipv6_address_gets_brackets(endpoint: str, bracketed: str) -> None:
    assert bracket_host(endpoint) == bracketed
    assert is_local(endpoint) == is_local(bracketed)


@pytest.mark.parametrize("host", ["[::1]", *([NAME] if has_ipv6_name() else [])])
def test_gateways_reach_an_engine_on_an_ipv6_address(
    make_bench: Callable[..., Any], context: zmq.Context[zmq.Socket[bytes]], host: str
) -> None:
    bound = make_bench("tcp://::1:*").server.endpoint
    assert bound.startswith("tcp://[::1]:")
    endpoint = f"tcp://{host}:{bound.rpartition(':')[2]}"
    client = context.socket(zmq.DEALER)
    use_address_family(client, endpoint, connects=True)
    monitor = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    client.connect(endpoint)
    assert monitor.poll(5000), "no connection"
    client.disable_monitor()


@pytest.mark.parametrize(
    ("endpoint", "connects", "allowed"),
    [
        ("tcp://leader.demo.svc:5557", True, True),
        ("tcp://leader.demo.svc:5557", False, False),
        ("tcp://10.0.0.1:5557", True, False),
        ("tcp://[fd00::1]:5557", False, True),
        ("ipc:///tmp/engine", True, False),
    ],
)
def test_sockets_may_use_ipv6_if_the_endpoint_may_need_it(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, connects: bool, allowed: bool
) -> None:
    client = context.socket(zmq.DEALER)
    use_address_family(client, endpoint, connects=connects)
    assert bool(client.ipv6) is allowed


def read_json(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://[::1]:{port}{path}", timeout=5) as answer:
        return json.loads(answer.read())


def test_an_engine_answers_probes_on_an_ipv6_address() -> None:
    def healthy() -> Health:
        return Health(ok=True, body={"phase": "ready"})

    server = HttpServer("::1", 0, Routes(healthy, healthy, dict, CollectorRegistry()))
    try:
        assert read_json(server.server_port, "/healthz") == {"phase": "ready"}
    finally:
        server.stop()


def test_a_fetch_reports_its_progress_on_an_ipv6_address() -> None:
    with serve_progress(FetchProgress(), "::1", 0) as port:
        assert read_json(port, "/progress")["phase"] == "starting"
