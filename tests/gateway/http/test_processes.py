# SPDX-License-Identifier: Apache-2.0
"""Several gateway processes behind one port and one admin port."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mizzen.gateway.http.admin_fanout import AdminFanout, merge_metrics, merge_tables
from mizzen.gateway.http.request_bodies import BodyBudget

PROGRAM = """
import json, sys
from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.main import run
options = json.loads(sys.argv[1])
sys.exit(run(GatewayConfig(**{**options, "engine": tuple(options["engine"])})))
"""
BODY: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


class Program:
    """A gateway with several processes behind one port."""

    def __init__(self, folder: Path, **options: Any) -> None:
        (folder / "token").write_text("secret")
        options = {
            "served_name": "demo",
            "port": 0,
            "admin_port": 0,
            "processes": 2,
            "access_log": "off",
            "admin_token_file": str(folder / "token"),
            **options,
        }
        self._log = folder / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen([sys.executable, "-c", PROGRAM, json.dumps(options)], stderr=log)
        self.port = self.admin = 0

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def wait(self, check: Callable[[], object], seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def wait_serving(self) -> None:
        self.wait(lambda: "processes started" in self.log)
        line = next(line for line in self.log.splitlines() if "processes started" in line)
        self.port, self.admin = json.loads(line)["port"], json.loads(line)["admin_port"]
        self.wait(lambda: [engine["state"] for engine in self.table()["engines"]] == ["serving"])

    def get(self, path: str, token: str = "secret") -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"}
        return httpx.get(f"http://127.0.0.1:{self.admin}{path}", headers=headers, timeout=60)

    def table(self) -> dict[str, Any]:
        answer = self.get("/admin/engines")
        return answer.json() if answer.status_code == 200 else {"engines": []}

    def ask(self) -> httpx.Response:
        """Send a request on a new connection, which the kernel gives to any of the processes."""
        return httpx.post(f"http://127.0.0.1:{self.port}/v1/chat/completions", json=BODY, timeout=60)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def program(tmp_path: Path, scripted: Any) -> Iterator[Callable[..., tuple[Program, Any]]]:
    started: list[Program] = []

    def start(**options: Any) -> tuple[Program, Any]:
        engine = scripted()
        program = Program(tmp_path, engine=[engine.endpoint], **options)
        started.append(program)
        program.wait_serving()
        return program, engine

    yield start
    for started_program in started:
        started_program.end()


def test_processes_serve_and_stop_together(program: Any) -> None:
    gateway, engine = program()
    assert len(gateway.children) == 2
    assert engine.hellos == 2
    for _ in range(40):
        assert gateway.ask().status_code == 200
    assert gateway.get("/healthz").status_code == gateway.get("/readyz").status_code == 200
    assert gateway.get("/admin/engines", "wrong").status_code == 401
    assert gateway.get("/nowhere").status_code == 404
    counts: dict[str, float] = {}
    for family in text_string_to_metric_families(gateway.get("/metrics").text):
        for sample in family.samples:
            assert sample.labels["process"] in ("0", "1")
            if sample.name == "mizzen_gateway_requests_total":
                counts[sample.labels["process"]] = counts.get(sample.labels["process"], 0) + sample.value
    assert sum(counts.values()) == 40
    engine.does.step_seconds = 0.02
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="x", max_retries=0)
    stream = client.chat.completions.create(**{**BODY, "max_tokens": 60}, stream=True)
    first = next(stream)
    gateway.process.send_signal(signal.SIGTERM)
    reasons = [choice.finish_reason for chunk in (first, *stream) for choice in chunk.choices]
    assert reasons[-1] == "length", "a stream ends in its time"
    assert gateway.process.wait(60) == 0
    assert gateway.log.count('"stopped"') == 2


def test_processes_share_the_limits_of_a_key(program: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    key = {"name": "a", "key": "sk-alice-0123456789", "requestsPerMinute": 40}
    keys.write_text(json.dumps({"keys": [key]}))
    gateway, _ = program(api_keys_file=(str(keys),))
    headers = {"Authorization": "Bearer sk-alice-0123456789"}
    url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
    began, codes = time.monotonic(), []
    with httpx.Client(timeout=60, trust_env=False, headers=headers) as http:  # one connection, so one process
        while codes.count(429) < 5 or (codes.count(200) < 36 and time.monotonic() < began + 20):
            codes.append(http.post(url, json=BODY).status_code)
    refilled = 40 * (time.monotonic() - began) / 60
    assert set(codes) == {200, 429}
    assert 0.9 * 40 <= codes.count(200) <= 1.1 * 40 + refilled


def test_death_of_one_process_ends_the_others(program: Any) -> None:
    """The pod restarts instead of serving with fewer processes than configured."""
    gateway, _ = program()
    first, other = gateway.children
    first.kill()
    assert gateway.process.wait(60) == 1
    gateway.wait(lambda: not other.is_running())
    assert "exited by itself" in gateway.log


def test_no_process_outlives_the_parent(program: Any) -> None:
    gateway, _ = program()
    children = gateway.children
    gateway.process.kill()
    gateway.wait(lambda: not any(child.is_running() for child in children))


def test_port_in_use_is_reported(tmp_path: Path) -> None:
    async def start_second() -> tuple[int, str]:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        second_program = Program(tmp_path, engine=["tcp://127.0.0.1:9"], port=port)
        return await asyncio.to_thread(second_program.process.wait, 60), second_program.log

    status, log = asyncio.run(start_second())
    assert status == 1
    assert "cannot listen on 127.0.0.1" in log


async def test_forwarded_admin_requests_reach_a_process_unchanged(
    live: Any, scripted: Any, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret")
    gateway = await live(scripted(), admin_token_file=str(tmp_path / "token"))
    admin_fanout = AdminFanout([int(gateway.admin.rpartition(":")[2])], BodyBudget(3000), 2000)
    admin = {"authorization": "Bearer secret", "x-mizzen-session": "s"}
    try:
        transport = httpx.ASGITransport(admin_fanout.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://admin", timeout=60) as http:
            response = await http.post("/debug/route", json=BODY, headers=admin)
            assert response.json()["session"] == "s"
            for path in (
                "/debug/route",
                "/admin/verify",
            ):  # bodies are limited before clients are authenticated
                large = await http.post(path, content=b" " * 2001)
                assert large.status_code == 413
                assert large.json()["error"]["code"] == "body_too_large"
            await next(iter(gateway.gateway.engines)).stop()
            away = await http.post("/debug/route", json=BODY, headers=admin)
            assert (away.status_code, away.headers["retry-after"]) == (503, "1")
    finally:
        await admin_fanout.close()


def table(*engines: tuple[str, str, int], synced: bool = True) -> dict[str, Any]:
    table_engines = [
        {
            "service": "s",
            "name": name,
            "uid": name,
            "state": state,
            "requests": requests,
            "problem": "",
            "protocol": 0 if state == "foreign" else 3,
            "otherProtocol": state == "foreign",
            "keys": ["old", "new"] if synced else ["old"],
        }
        for name, state, requests in engines
    ]
    idle = {"idleSeconds": 1.0 if synced else 0.5}
    return {
        "synced": synced,
        "apiKeys": {"inForce": 2, "problem": ""} if synced else {"inForce": 1, "problem": "no YAML"},
        "keys": ["new", "old"] if synced else ["old"],
        "version": f"v{len(table_engines)}",
        "waiting": 1,
        "queued": 1,
        "inFlight": 2,
        **idle,
        "engines": table_engines,
    }


def test_merged_table_serves_only_if_all_processes_do() -> None:
    first = table(("a", "serving", 2), ("b", "serving", 0), ("c", "serving", 1), ("d", "broken", 0))
    second = table(("a", "serving", 3), ("b", "connecting", 0), ("d", "serving", 0), synced=False)
    merged = merge_tables([first, second])
    assert {engine["name"]: (engine["state"], engine["requests"]) for engine in merged["engines"]} == {
        "a": ("serving", 5),
        "b": ("connecting", 0),
        "c": ("connecting", 1),
        "d": ("broken", 0),
    }
    assert merged["keys"] == ["old"], "what every process has"
    assert merged["apiKeys"] == {"inForce": 1, "problem": "no YAML"}
    assert merge_tables([{**first, "apiKeys": None}])["apiKeys"] is None
    assert merged["engines"][0]["keys"] == ["new", "old"], "what any process uses"
    assert (merged["synced"], merged["waiting"], merged["version"]) == (False, 2, "v4,v3")
    assert (merged["queued"], merged["inFlight"], merged["idleSeconds"]) == (2, 4, 0.5)


def test_merged_table_reports_a_protocol_mismatch_only_if_all_processes_do() -> None:
    first = table(("a", "foreign", 0), ("b", "foreign", 0), ("c", "foreign", 0), ("d", "serving", 0))
    second = table(("a", "foreign", 0), ("b", "broken", 0), ("d", "foreign", 0))
    for tables in ([first, second], [second, first]):
        merged = {engine["name"]: engine["otherProtocol"] for engine in merge_tables(tables)["engines"]}
        assert merged == {"a": True, "b": False, "c": False, "d": False}
        versions = {engine["name"]: engine["protocol"] for engine in merge_tables(tables)["engines"]}
        assert versions == {"a": 0, "b": 3, "c": 0, "d": 3}


def test_metrics_are_merged_by_family() -> None:
    text = '# HELP a A.\n# TYPE a gauge\na{x="1"} 2\n# HELP b B.\n# TYPE b gauge\nb 3\n'
    other = '# HELP a A.\n# TYPE a gauge\na{x="}, 7"} 4\n'
    assert merge_metrics({0: text, 2: other}) == (
        '# HELP a A.\n# TYPE a gauge\na{x="1",process="0"} 2\na{x="}, 7",process="2"} 4\n'
        '# HELP b B.\n# TYPE b gauge\nb{process="0"} 3\n'
    )
