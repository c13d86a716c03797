# SPDX-License-Identifier: Apache-2.0
"""Stores that kopf fills from a real API server, through a proxy that injects faults."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import kopf
import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from mizzen_local.controlplane import ControlPlane
from mizzen_operator.informers import informer
from mizzen_operator.informers.informer import LABEL_SELECTORS, Informers, kopf_settings
from mizzen_operator.informers.watch_health import WatchHealth
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.paged_list import ObjectList
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.kube.store import ObjectName, ObjectStore, ObjectVersion
from mizzen_operator.metrics import Metrics
from mizzen_operator.resources.metadata import CONTAINER_SECURITY, POD_SECURITY
from watch_proxy import Proxy

LABELS = {"mizzen.dev/component": "engine", "mizzen.dev/service": "demo"}
GONE = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
SECONDS = 120.0


class Replica:
    """The stores of one operator replica, and a direct client of the API server."""

    def __init__(self, proxy: Proxy, caches: Informers, kube: KubeClient, namespace: str) -> None:
        self.proxy, self.caches, self.kube, self._namespace = proxy, caches, kube, namespace
        self.ended: asyncio.Task[None] | None = None

    @property
    def pods(self) -> ObjectStore:
        cache = self.caches.get("Pod")
        assert cache is not None
        return cache

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; fail if kopf ends first."""
        assert self.ended is not None
        async with asyncio.timeout(SECONDS):
            while not condition():
                assert not self.ended.done(), self.ended
                await asyncio.sleep(0.02)

    async def catch_up(self) -> None:
        """Bring the stores up to date with the API server, as a new leader does."""
        await self.caches.catch_up(self.kube)

    async def settled(self) -> None:
        """Wait until all stores hold the objects and versions that the API server has."""
        for kind, selector in LABEL_SELECTORS.items():
            cache = self.caches.get(kind)
            assert cache is not None
            versions_on_server = await self.kube.list_versions(ObjectRef(kind, self._namespace), selector)
            await self.until(
                lambda cache=cache, versions_on_server=versions_on_server: cache.is_up_to_date(
                    versions_on_server.objects, versions_on_server.version
                )
            )


@pytest.fixture
def run_scenario(
    control_plane: ControlPlane, api: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Return a function that runs a scenario with a replica, three engine pods and one foreign pod."""
    for name in ("one", "two", "three"):
        api.create(pod(namespace, name))
    api.create(pod(namespace, "foreign", {}))

    async def run(scenario: Callable[[Replica], Awaitable[None]], **watching: Any) -> None:
        proxy, metrics = Proxy(control_plane), Metrics()
        async with proxy.running() as server:
            configuration = Configuration(host=server, api_key={"BearerToken": "Bearer none"})
            monkeypatch.setattr(informer, "load_configuration", AsyncMock(return_value=configuration))
            kube = KubeClient(direct(control_plane), metrics)
            caches = Informers(namespace, WatchHealth(metrics), lambda *change: None)
            replica = Replica(proxy, caches, kube, namespace)
            registry, chosen, stop = kopf.OperatorRegistry(), kopf_settings(), asyncio.Event()
            chosen.process.ultimate_exiting_timeout = (
                None  # otherwise kopf later kills this process if it ends
            )
            for name, value in watching.items():
                setattr(chosen.watching, name, value)
            caches.register(registry)
            operator = kopf.operator(
                registry=registry, settings=chosen, namespaces=[namespace], stop_flag=stop
            )
            replica.ended = asyncio.create_task(operator)
            try:
                await replica.until(lambda: replica.pods.synced)
                await replica.settled()
                assert len(replica.pods) == 3
                await scenario(replica)
            finally:
                stop.set()
                await asyncio.wait({replica.ended}, timeout=SECONDS)
                await caches.close()
                await kube.close()

    def start(scenario: Callable[[Replica], Awaitable[None]], **watching: Any) -> None:
        try:
            asyncio.run(run(scenario, **watching))
        finally:
            gc.collect()  # exceptions of kopf's tasks are reported here and not in another test

    return start


def direct(plane: ControlPlane) -> Configuration:
    pki, configuration = plane.folder / "pki", Configuration(host=plane.server)
    configuration.ssl_ca_cert = str(plane.authority)
    configuration.cert_file, configuration.key_file = str(pki / "admin.crt"), str(pki / "admin.key")
    return configuration


def pod(namespace: str, name: str, labels: dict[str, str] = LABELS) -> dict[str, Any]:
    container = {"name": "engine", "image": "none", "securityContext": CONTAINER_SECURITY}
    spec = {"containers": [container], "securityContext": POD_SECURITY, "terminationGracePeriodSeconds": 0}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": spec,
    }


def change_everything(api: Any, namespace: str) -> None:
    """Delete one pod, change one, create one, and replace one by another of the same name."""
    api.delete("Pod", namespace, "one", gracePeriodSeconds=0)
    api.patch("Pod", namespace, "two", {"metadata": {"annotations": {"changed": "yes"}}})
    api.create(pod(namespace, "four"))
    api.delete("Pod", namespace, "three", gracePeriodSeconds=0)
    api.create(pod(namespace, "three"))


def names(cache: ObjectStore) -> list[str]:
    return [body["metadata"]["name"] for body in cache.list()]


def test_a_watch_that_is_cut_loses_no_deletion(run_scenario: Any, api: Any, namespace: str) -> None:
    async def scenario(replica: Replica) -> None:
        away = True

        async def refuse(request: web.Request) -> None:
            if away:
                raise ConnectionAbortedError

        lists = replica.proxy.lists.count("pods")
        replica.proxy.fault = refuse
        replica.proxy.cut()
        await asyncio.to_thread(change_everything, api, namespace)
        away = False
        await replica.until(lambda: names(replica.pods) == ["four", "three", "two"])
        await replica.settled()
        assert replica.proxy.lists.count("pods") >= lists

    run_scenario(scenario)


def test_deletions_are_noticed_by_the_list_after_a_watch_has_expired(
    run_scenario: Any, api: Any, namespace: str
) -> None:
    async def scenario(replica: Replica) -> None:
        expired: set[str] = set()

        async def forget(request: web.Request) -> web.Response | None:
            if "watch" not in request.query or request.path in expired:
                return None
            await changed.wait()
            expired.add(request.path)
            return web.Response(text=json.dumps(GONE) + "\n", content_type="application/json")

        changed = asyncio.Event()
        before = replica.pods.list_count
        replica.proxy.fault = forget
        replica.proxy.cut()
        await asyncio.to_thread(change_everything, api, namespace)
        changed.set()
        await replica.until(lambda: replica.pods.list_count > before and replica.pods.synced)
        assert names(replica.pods) == ["four", "three", "two"]
        await replica.settled()
        api.delete("Pod", namespace, "four", gracePeriodSeconds=0)
        await replica.until(lambda: names(replica.pods) == ["three", "two"])

    run_scenario(scenario)


def test_watches_survive_errors_of_the_api_server(run_scenario: Any, api: Any, namespace: str) -> None:
    async def scenario(replica: Replica) -> None:
        answers = {"watch": [401, 500, 404, 401, 429, 503], "list": [500, 404, 401, 410, 400]}
        expire = {"pods"}

        async def fail(request: web.Request) -> web.Response | None:
            if not request.path.endswith("/pods"):
                return None
            left = answers["watch" if "watch" in request.query else "list"]
            if left:
                return web.json_response({"kind": "Status", "message": "no"}, status=left.pop(0))
            if "watch" in request.query and expire:
                expire.clear()
                return web.Response(text=json.dumps(GONE) + "\n", content_type="application/json")
            return None

        replica.proxy.fault = fail
        replica.proxy.cut()
        await asyncio.to_thread(change_everything, api, namespace)
        await replica.until(lambda: not any(answers.values()) and not expire)
        await replica.until(lambda: names(replica.pods) == ["four", "three", "two"])
        await replica.settled()

    run_scenario(scenario)


def test_a_silent_connection_is_replaced(run_scenario: Any, api: Any, namespace: str) -> None:
    async def scenario(replica: Replica) -> None:
        replica.proxy.mute_watches = True
        await asyncio.to_thread(change_everything, api, namespace)
        silent = replica.proxy.watching("pods")
        await replica.until(lambda: not silent & replica.proxy.watching("pods"))
        replica.proxy.mute_watches = False
        await replica.until(lambda: names(replica.pods) == ["four", "three", "two"])

    run_scenario(scenario, inactivity_timeout=1.0)


def test_a_new_leader_waits_for_late_events(
    run_scenario: Any, api: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(informer, "CATCH_UP_SECONDS", 0.5)

    async def scenario(replica: Replica) -> None:
        replica.proxy.mute_watches = True
        await asyncio.to_thread(change_everything, api, namespace)
        silent = replica.proxy.watching("pods")
        waiting = asyncio.create_task(replica.catch_up())
        await replica.until(lambda: not silent & replica.proxy.watching("pods"))
        assert not waiting.done() and "one" in names(replica.pods)
        replica.proxy.mute_watches = False
        await replica.until(waiting.done)
        await waiting
        assert names(replica.pods) == ["four", "three", "two"]

    run_scenario(scenario)


def test_a_new_leader_does_not_wait_for_events_of_objects_that_are_gone(
    run_scenario: Any, api: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod was created, listed and deleted while the watch was cut, so no event ever reports it."""
    monkeypatch.setattr(informer, "CATCH_UP_SECONDS", 0.5)

    async def scenario(replica: Replica) -> None:
        gone = ObjectList({ObjectName(namespace, "gone"): ObjectVersion("uid of gone", 1)}, 1)
        list_versions, listed = replica.kube.list_versions, list[str]()

        async def first_with_one_more(ref: ObjectRef, selector: str) -> ObjectList:
            versions_on_server = await list_versions(ref, selector)
            if ref.kind != "Pod" or ref.kind in listed:
                return versions_on_server
            listed.append(ref.kind)
            return ObjectList({**versions_on_server.objects, **gone.objects}, versions_on_server.version)

        monkeypatch.setattr(replica.kube, "list_versions", first_with_one_more)
        async with asyncio.timeout(SECONDS):
            await replica.catch_up()
        assert listed == ["Pod"]

    run_scenario(scenario)


@pytest.mark.parametrize("refused", [("inferenceservices", "pods", "deployments", "services"), ("pods",)])
def test_if_kopf_ends_the_process_releases_its_lease_and_exits(
    control_plane: ControlPlane, api: Any, namespace: str, tmp_path: Path, refused: tuple[str, ...]
) -> None:
    """Kopf ends if a watch is refused with HTTP status 410, but it does not end its other watches."""

    async def refuse(request: web.Request) -> web.Response | None:
        gone = web.json_response({"kind": "Status", "code": 410}, status=410)
        return gone if "watch" in request.query and request.path.endswith(refused) else None

    def holder() -> str:
        lease = api.find("Lease", namespace, "mizzen-operator")
        return lease["spec"]["holderIdentity"] if lease else "no Lease"

    async def scenario() -> None:
        proxy = Proxy(control_plane)
        async with proxy.running() as server:
            options = ("--namespace", namespace, "--lease-namespace", namespace, "--identity", "replica")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "mizzen_operator.main", "--health-port", "0", *options),
                env={**os.environ, "KUBECONFIG": str(kubeconfig(tmp_path, server))},
                stderr=(tmp_path / "log").open("wb"),
            )
            try:
                async with asyncio.timeout(SECONDS):
                    while (
                        len(proxy.watches) < len(LABEL_SELECTORS)
                        or await asyncio.to_thread(holder) != "replica"
                    ):
                        assert process.returncode is None, (tmp_path / "log").read_text()
                        await asyncio.sleep(0.1)
                    proxy.fault = refuse
                    proxy.cut()
                    assert await process.wait() == 1
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    asyncio.run(scenario())
    assert holder() == ""
    log = (tmp_path / "log").read_text()
    assert "kopf stopped with an error" in log
    assert "re-authenticate" not in log  # a remaining watch without a session would log this


def kubeconfig(folder: Path, server: str) -> Path:
    path = folder / "kubeconfig"
    body = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "it", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": {"token": "none"}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "me"}}],
        "current-context": "it",
    }
    path.write_text(json.dumps(body))
    return path
