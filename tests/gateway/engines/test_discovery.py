# SPDX-License-Identifier: Apache-2.0
"""Discovery of engine pods by list and watch, against a server that speaks the Kubernetes API's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.engines import kube_watch
from mizzen.gateway.engines.discovered_engine import DiscoveredEngine
from mizzen.gateway.engines.engine_pods import EnginePod, PodWatch, discover_engine
from mizzen.gateway.telemetry.metrics import Metrics


def pod(name: str, ip: str | None = "10.0.0.1", ready: bool = True, **extra: Any) -> dict[str, Any]:
    """Return a pod as the API server sends it."""
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": "5",
            "labels": {"mizzen.dev/revision": "r7"},
            **extra.get("metadata", {}),
        },
        "spec": {
            "containers": [{"name": "sidecar"}, {"ports": [{"name": "wire", "containerPort": 5557}]}],
            **extra.get("spec", {}),
        },
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "ContainersReady", "status": "True" if ready else "False"}],
            **extra.get("status", {}),
        },
    }


def discovered(pod: dict[str, Any]) -> DiscoveredEngine | None:
    return discover_engine(msgspec.convert(pod, EnginePod))


def test_only_ready_engine_pods_are_discovered() -> None:
    assert discovered(pod("a")) == DiscoveredEngine(
        name="a", uid="uid-a", endpoint="tcp://10.0.0.1:5557", revision="r7"
    )
    assert discovered(pod("a", ready=False)) is None
    assert discovered(pod("a", ip=None)) is None
    assert discovered(pod("a", spec={"containers": [{"ports": None}]})) is None
    assert discovered(pod("a", status={"phase": "Failed", "podIP": "10.0.0.1"})) is None
    six = discovered(pod("a", ip="fd00::1"))
    assert six is not None
    assert six.endpoint == "tcp://[fd00::1]:5557"
    ending = discovered(
        pod("a", ready=False, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z", "uid": "u"})
    )
    assert ending is not None
    assert ending.terminating


class ApiServer:
    """A fake Kubernetes API server that lists the objects in `pods` and sends the events in `events`."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.queries: list[dict[str, str]] = []
        self.tokens: list[str] = []
        self.down = False
        self.refused = 0
        self.status = 200

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.down:
            self.refused += 1
            return web.json_response({"message": "etcd is away"}, status=503)
        self.queries.append(dict(request.query))
        self.tokens.append(request.headers.get("authorization", ""))
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "5"}, "items": self.pods})
        if self.status != 200:
            status, self.status = self.status, 200
            return web.json_response({"message": "too old"}, status=status)
        response = web.StreamResponse()
        await response.prepare(request)
        while (line := await self.events.get()) is not None:
            await response.write(line)
        return response

    def send(self, kind: str, object_json: dict[str, Any]) -> None:
        self.events.put_nowait(json.dumps({"type": kind, "object": object_json}).encode() + b"\n")


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/here/pods", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t0ken"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(path))
    yield server
    server.events.put_nowait(None)
    await runner.cleanup()


class Table:
    """A fake routing table that records the engines of each update."""

    def __init__(self) -> None:
        self.reports: list[dict[str, DiscoveredEngine]] = []

    def sync(self, engines: Any) -> None:
        self.reports.append({engine.name: engine for engine in engines})

    @property
    def now(self) -> dict[str, DiscoveredEngine]:
        return (
            self.reports[-1] if self.reports else {"nothing": DiscoveredEngine(name="", uid="", endpoint="")}
        )


@pytest.fixture
async def table(api: ApiServer) -> AsyncIterator[Table]:
    table = Table()
    config = GatewayConfig(served_name="demo", service="svc", namespace="here")
    watch = asyncio.create_task(PodWatch(config, table.sync, Metrics()).run())
    yield table
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


async def test_pod_changes_reach_the_routing_table(api: ApiServer, table: Table, until: Any) -> None:
    await until(lambda: table.now == {})
    api.send("ADDED", pod("a", ready=False))
    api.send("MODIFIED", pod("a"))
    await until(lambda: set(table.now) == {"a"})
    api.send("ADDED", pod("b", metadata={"uid": "b", "annotations": {"large": "x" * 300_000}}))
    await until(lambda: set(table.now) == {"a", "b"})
    api.send("MODIFIED", pod("a", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}))
    await until(lambda: table.now["a"].terminating)
    api.send("DELETED", pod("a"))
    await until(lambda: set(table.now) == {"b"})
    assert api.tokens[0].lower() == "bearer t0ken"
    assert api.queries[0]["labelSelector"] == "mizzen.dev/service=svc,mizzen.dev/component=engine"
    assert api.queries[1]["resourceVersion"] == "5"
    assert api.queries[1]["allowWatchBookmarks"] == "true"


async def test_next_watch_continues_at_the_last_resource_version(
    api: ApiServer, table: Table, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: len(api.queries) == 2)
    monkeypatch.setattr(kube_watch, "WATCH_SECONDS", 0)
    api.events.put_nowait(None)
    await until(lambda: len(api.queries) == 4)  # from now on, no watch ends too early
    metadata = {
        "resourceVersion": "77",
        "creationTimestamp": None,
    }  # the form in which kube-apiserver 1.36 sends bookmarks
    bookmark = {"kind": "Pod", "metadata": metadata, "spec": {"containers": None}, "status": {}}
    api.send("BOOKMARK", bookmark)
    api.events.put_nowait(None)
    await until(lambda: len(api.queries) == 5)
    assert api.queries[4]["resourceVersion"] == "77"
    assert "watch" in api.queries[4]


@pytest.mark.parametrize("how", ["older event", "early end"])
async def test_after_a_restored_backup_the_pods_are_listed_again(
    api: ApiServer, table: Table, until: Any, how: str
) -> None:
    """The API server accepts a watch from a version that it has not reached yet, and sends no events."""
    await until(lambda: table.now == {})
    api.pods = [pod("a")]
    if how == "older event":
        api.send("BOOKMARK", {"metadata": {"resourceVersion": "4"}, "spec": {}, "status": {}})
    else:
        api.events.put_nowait(None)
    await until(lambda: set(table.now) == {"a"})


@pytest.mark.parametrize("how", ["event", "status"])
async def test_expired_resource_version_causes_a_list(
    api: ApiServer, table: Table, until: Any, how: str
) -> None:
    api.pods = [pod("a")]
    if how == "status":
        api.status = 410
    else:
        api.send("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
    await until(lambda: len([query for query in api.queries if "watch" not in query]) == 2)
    await until(lambda: set(table.now) == {"a"})


@pytest.mark.parametrize("how", ["event", "status", "forbidden", "closed"])
async def test_watches_that_end_at_once_are_throttled(
    api: ApiServer, table: Table, until: Any, how: str
) -> None:
    await until(lambda: table.now == {})
    statuses = {"status": 410, "forbidden": 403}
    began, at = len(api.queries), time.monotonic()
    if how in statuses:
        api.events.put_nowait(None)  # ends the watch that started successfully
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1):
            while True:
                api.status = statuses.get(how, 200)
                if how == "event":
                    api.send("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
                elif how == "closed":
                    api.events.put_nowait(None)
                await asyncio.sleep(0.001)
    watches, seconds = len(api.queries) - began, time.monotonic() - at
    assert watches <= 12 * max(1.0, seconds)
    await until(lambda: len(api.queries) > began)


async def test_routing_table_stays_while_the_api_server_is_unavailable(
    api: ApiServer, table: Table, until: Any
) -> None:
    api.pods = [pod("a")]
    await until(lambda: set(table.now) == {"a"})
    api.down = True
    api.events.put_nowait(None)
    await until(lambda: api.refused)
    assert set(table.now) == {"a"}
    api.pods, api.down = [pod("a"), pod("b", metadata={"uid": "b"})], False
    await until(lambda: set(table.now) == {"a", "b"})
    assert all("a" in report for report in table.reports if report)


async def test_malformed_api_responses_are_survived(api: ApiServer, table: Table, until: Any) -> None:
    await until(lambda: table.now == {})
    api.events.put_nowait(b"not json\n")
    api.pods = [pod("a")]
    await until(lambda: set(table.now) == {"a"})
