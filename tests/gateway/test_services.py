# SPDX-License-Identifier: Apache-2.0
"""Several services behind one gateway: routing by name, suspension, changes, and separate keys."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import zmq
from aiohttp import web

from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.engines.discovered_engine import DiscoveredEngine
from mizzen.gateway.engines.shared_services import SharedServicesWatch
from mizzen.gateway.services import parse_services
from mizzen.gateway.telemetry.metrics import Metrics
from mizzen.wire.curve_keys import WireKeys
from mizzen.wire.messages import PROTOCOL, Welcome
from mizzen.wire.server.engine_server import WireServer


def write(path: Path, *services: dict[str, Any]) -> None:
    path.with_suffix(".new").write_text(json.dumps({"services": services}))
    path.with_suffix(".new").replace(path)


def entry(name: str, *engines: Any, models: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    endpoints = [engine if isinstance(engine, str) else engine.endpoint for engine in engines]
    return {"name": name, "models": models or (name,), "engines": endpoints, **fields}


@pytest.fixture
def shared(live: Any, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that starts a gateway with a services file.

    It returns the gateway and the path of the file.
    """

    async def start(*services: dict[str, Any], serving: int, **options: Any) -> tuple[Any, Path]:
        path = tmp_path / "services.json"
        write(path, *services)
        gateway = await live(served_name="", engine=(), services_file=str(path), wait=False, **options)
        await gateway.serving(serving)
        return gateway, path

    return start


async def ask(gateway: Any, model: str, key: str = "none") -> int:
    answer = await gateway.client(key).completions.create(model=model, prompt="a", max_tokens=2)
    return answer.usage.completion_tokens


async def test_requests_are_routed_by_model_name(shared: Any, scripted: Any) -> None:
    first, second = scripted(model="one"), scripted(model="two", context_length=512)
    gateway, _ = await shared(entry("one", first, models=("one", "uno")), entry("two", second), serving=2)
    for model in ("one", "uno", "two", "one"):
        assert await ask(gateway, model) == 2
    assert (len(first.requests), len(second.requests)) == (3, 1)
    models = {model.id: model async for model in gateway.client().models.list()}
    assert set(models) == {"one", "uno", "two"}
    assert {name: model.model_dump()["root"] for name, model in models.items()} == {
        "one": "one",
        "uno": "one",
        "two": "two",
    }
    assert models["two"].model_dump()["max_model_len"] == 512
    assert (await gateway.client().models.retrieve("uno")).id == "uno"
    with pytest.raises(
        openai.NotFoundError, match="'three' does not exist here; available models: one, uno, two"
    ):
        await ask(gateway, "three")
    with pytest.raises(openai.NotFoundError):
        await gateway.client().models.retrieve("three")


async def test_model_name_claimed_twice_belongs_to_the_first_service(
    shared: Any, scripted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = scripted(), scripted()
    gateway, _ = await shared(
        entry("one", first, models=("chat",)), entry("two", second, models=("chat", "b")), serving=2
    )
    await ask(gateway, "chat")
    await ask(gateway, "b")
    assert (len(first.requests), len(second.requests)) == (1, 1)
    assert "belongs to another service" in caplog.text


async def test_suspended_service_answers_503_only_for_its_models(shared: Any, scripted: Any) -> None:
    first, second = scripted(), scripted()
    gateway, path = await shared(entry("one", first), entry("two", second, suspended=True), serving=2)
    assert await ask(gateway, "one") == 2
    with pytest.raises(openai.APIStatusError) as refused:
        await ask(gateway, "two")
    assert (refused.value.status_code, refused.value.code) == (503, "suspended")
    assert int(refused.value.response.headers["retry-after"]) >= 1
    write(path, entry("one", first), entry("two", second))
    await eventually(lambda: answers(gateway, "two"))


async def answers(gateway: Any, model: str) -> bool:
    try:
        await ask(gateway, model)
    except openai.APIStatusError:
        return False
    return True


async def eventually(check: Callable[[], Any], expected: bool = True) -> None:
    deadline = time.monotonic() + 60
    while await check() != expected:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_removed_service_finishes_its_streams(shared: Any, scripted: Any, until: Any) -> None:
    first, second = scripted(), scripted()
    first.does.step_seconds = 0.05
    gateway, path = await shared(entry("one", first), serving=1)
    stream = await gateway.client().completions.create(
        model="one", prompt="a", max_tokens=60, stream=True, stream_options={"include_usage": True}
    )
    write(path, entry("two", second))
    await eventually(lambda: answers(gateway, "two"))
    with pytest.raises(openai.NotFoundError):
        await ask(gateway, "one")
    usage = [chunk.usage async for chunk in stream if chunk.usage]
    assert usage[0].completion_tokens == 60
    path.write_text("no json")
    await asyncio.sleep(1.5)
    assert await answers(gateway, "two")  # an unreadable file does not change the services


async def test_service_without_engines_does_not_use_engines_of_other_services(
    shared: Any, scripted: Any
) -> None:
    engine = scripted()
    gateway, _ = await shared(entry("one", engine), entry("two"), serving=1, queue_timeout_seconds=0.3)
    assert await ask(gateway, "one") == 2
    with pytest.raises(openai.APIStatusError) as refused:
        await ask(gateway, "two")
    assert (refused.value.status_code, refused.value.code) == (503, "no_engine")


async def test_each_service_has_its_own_queue(shared: Any, scripted: Any, until: Any) -> None:
    busy, free = scripted(), scripted()
    busy.does.step_seconds = 0.05
    gateway, _ = await shared(
        entry("busy", busy),
        entry("free", free),
        serving=2,
        max_in_flight=1,
        queue_size=1,
        queue_timeout_seconds=60,
    )
    client = gateway.client()
    waiting = [
        asyncio.create_task(client.completions.create(model="busy", prompt="a", max_tokens=900))
        for _ in range(2)
    ]
    service = gateway.gateway.services.get("busy")
    await until(lambda: service.admission.in_flight == 1 and len(service.admission) == 1)
    with pytest.raises(openai.RateLimitError):
        await ask(gateway, "busy")
    assert await ask(gateway, "free") == 2
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_admin_api_separates_services(shared: Any, scripted: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t0ken")
    first, second = scripted(), scripted()
    gateway, _ = await shared(
        entry("one", first), entry("two", second), serving=2, admin_token_file=str(tmp_path / "token")
    )
    async with httpx.AsyncClient(headers={"authorization": "Bearer t0ken"}, timeout=60) as http:
        every = (await http.get(f"{gateway.admin}/admin/engines")).json()
        of_two = (await http.get(f"{gateway.admin}/admin/engines?service=two")).json()
        none = (await http.get(f"{gateway.admin}/admin/engines?service=three")).json()
        assert (await http.get(f"{gateway.admin}/readyz")).status_code == 200
    assert {engine["service"] for engine in every["engines"]} == {"one", "two"}
    assert [engine["name"] for engine in of_two["engines"]] == [second.endpoint]
    assert none["engines"] == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "services.json"),
        ('{"services": [{"models": []}]}', "name"),
        ('{"services": [{"name": "a", "model": "b"}]}', "model"),
        ('{"services": [{"name": "a", "enginePublicKey": "short"}]}', "enginePublicKey"),
        ('{"services": [{"name": "a"}, {"name": "a"}]}', "two services are named a"),
    ],
)
def test_invalid_service_list_is_reported(content: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse_services(content.encode(), "services.json")
    assert "services.json" in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one of --served-name"),
        ({"served_name": "a", "services_file": "b"}, "give one of"),
        ({"services_file": "b", "engine": ("ipc://x",)}, "set them per service in --services-file"),
    ],
)
def test_incompatible_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatewayConfig(**options)


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────


class Keys:
    """A folder with a gateway's key pair; `server` creates wire servers that accept this gateway."""

    def __init__(self, folder: Path) -> None:
        self.gateway_public, gateway_secret = zmq.curve_keypair()
        folder.mkdir()
        (folder / "gateway.public").write_bytes(self.gateway_public)
        (folder / "gateway.secret").write_bytes(gateway_secret)
        self.folder = folder

    def server(self, name: str) -> tuple[WireServer, str]:
        """Return a wire server that has a new key pair, and the public key of this pair."""
        public, secret = zmq.curve_keypair()
        welcome = Welcome(PROTOCOL, name, "i", "r", name, "h", {}, 128, 512, (), 16, 4, False)
        keys = WireKeys(public, secret, self.gateway_public)
        return WireServer("tcp://127.0.0.1:*", keys, welcome, {}, max_waiting=4), public.decode()


@contextmanager
def pumped(*servers: WireServer) -> Iterator[None]:
    stop = threading.Event()

    def pump() -> None:
        while not stop.is_set():
            for server in servers:
                server.receive(time.monotonic(), 0)
            time.sleep(0.01)

    thread = threading.Thread(target=pump)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
        for server in servers:
            server.close()


async def test_each_service_has_its_own_engine_keys(shared: Any, tmp_path: Path, until: Any) -> None:
    keys = Keys(tmp_path / "keys")
    first, one_key = keys.server("one")
    second, two_key = keys.server("two")
    with pumped(first, second):
        gateway, path = await shared(
            entry("one", first, enginePublicKey=one_key),
            entry("two", second, enginePublicKey=one_key),  # the key of the other service's engines
            serving=0,
            keys=str(keys.folder),
        )
        await until(lambda: len(first.out.peers) == 1)
        service = gateway.gateway.services.get("two")
        [engine] = service.table
        await until(lambda: "rejects this gateway's keys" in engine.problem)
        assert len(second.out.peers) == 0
        write(
            path, entry("one", first, enginePublicKey=one_key), entry("two", second, enginePublicKey=two_key)
        )
        await until(lambda: len(second.out.peers) == 1)
        assert len(first.out.peers) == 1


# ── Kubernetes ────────────────────────────────────────────────────────────────────────────────────────────


class Api:
    """A fake Kubernetes API server with pods and ConfigMaps; its watches send the events in `events`."""

    def __init__(self) -> None:
        self.lists: dict[str, list[dict[str, Any]]] = {"pods": [], "configmaps": []}
        self.events: dict[str, asyncio.Queue[bytes | None]] = {name: asyncio.Queue() for name in self.lists}
        self.queries: dict[str, dict[str, str]] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        kind = request.path.rpartition("/")[2]
        if "watch" not in request.query:
            self.queries[kind] = dict(request.query)
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": self.lists[kind]})
        response = web.StreamResponse()
        await response.prepare(request)
        while (line := await self.events[kind].get()) is not None:
            await response.write(line)
        return response

    def send(self, kind: str, event: str, object_json: dict[str, Any]) -> None:
        self.events[kind].put_nowait(json.dumps({"type": event, "object": object_json}).encode() + b"\n")


def pod(name: str, service: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": name, "labels": {"mizzen.dev/service": service}},
        "spec": {"containers": [{"ports": [{"name": "wire", "containerPort": 5557}]}]},
        "status": {"podIP": "10.0.0.1", "conditions": [{"type": "ContainersReady", "status": "True"}]},
    }


def config_map(*services: dict[str, Any]) -> dict[str, Any]:
    data = {"services.json": json.dumps({"services": services})}
    return {"metadata": {"name": "mizzen-shared", "uid": "c", "resourceVersion": "2"}, "data": data}


class RecordedDiscovery:
    """Records the services and engines that discovery reports."""

    def __init__(self) -> None:
        self.services: list[str] = []
        self.engines: dict[str, list[DiscoveredEngine]] = {}

    def sync_services(self, entries: Any) -> None:
        self.services = [service.name for service in entries]

    def sync_engines(self, engines: dict[str, list[DiscoveredEngine]]) -> None:
        self.engines = engines


async def test_shared_gateway_watches_its_config_map_and_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    api = Api()
    api.lists["configmaps"] = [config_map({"name": "one", "models": ["one"]})]
    api.lists["pods"] = [pod("one-0", "one"), pod("unlabelled", "")]
    app = web.Application()
    for name in api.lists:
        app.router.add_get(f"/api/v1/namespaces/here/{name}", api.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    config = GatewayConfig(services_config_map="mizzen-shared", namespace="here")
    recorded: Any = RecordedDiscovery()
    watch = asyncio.create_task(SharedServicesWatch(config, recorded, Metrics()).run())
    try:
        await until(lambda: recorded.services == ["one"] and "one" in recorded.engines)
        assert api.queries["configmaps"] == {"fieldSelector": "metadata.name=mizzen-shared"}
        assert api.queries["pods"] == {
            "labelSelector": "mizzen.dev/gateway=shared,mizzen.dev/component=engine"
        }
        assert [engine.name for engine in recorded.engines["one"]] == ["one-0"]
        api.send("configmaps", "MODIFIED", config_map({"name": "one"}, {"name": "two"}))
        api.send("pods", "ADDED", pod("two-0", "two"))
        await until(lambda: recorded.services == ["one", "two"] and "two" in recorded.engines)
        api.send("configmaps", "MODIFIED", {**config_map(), "data": {"services.json": "{"}})
        api.send("configmaps", "DELETED", config_map())
        api.send("pods", "DELETED", pod("one-0", "one"))
        await until(lambda: "one" not in recorded.engines)
        assert recorded.services == ["one", "two"]  # the last readable list remains in use
    finally:
        for events in api.events.values():
            events.put_nowait(None)
        watch.cancel()
        await runner.cleanup()
