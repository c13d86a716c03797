"""Caches that kopf feeds from a real API server, through a proxy that does what networks and servers do."""

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


class Follower:
    """The caches as they are in a replica, and what the API server really has."""

    def __init__(self, proxy: Proxy, caches: Informers, kube: KubeClient, namespace: str) -> None:
        self.proxy, self.caches, self.kube, self._namespace = proxy, caches, kube, namespace
        self.ended: asyncio.Task[None] | None = None

    @property
    def pods(self) -> ObjectStore:
        cache = self.caches.get("Pod")
        assert cache is not None
        return cache

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, for as long as kopf lives."""
        assert self.ended is not None
        async with asyncio.timeout(SECONDS):
            while not condition():
                assert not self.ended.done(), self.ended
                await asyncio.sleep(0.02)

    async def catch_up(self) -> None:
        """Do what a replica does that has just taken the Lease."""
        await self.caches.catch_up(self.kube)

    async def settled(self) -> None:
        """Wait until all caches are what the API server has."""
        for kind, selector in LABEL_SELECTORS.items():
            cache = self.caches.get(kind)
            assert cache is not None
            there = await self.kube.list_versions(ObjectRef(kind, self._namespace), selector)
            await self.until(
                lambda cache=cache, there=there: cache.is_up_to_date(there.objects, there.version)
            )


@pytest.fixture
def following(
    control_plane: ControlPlane, api: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Runs a scenario with a follower of a namespace that has three pods, and one of somebody else's."""
    for name in ("one", "two", "three"):
        api.create(pod(namespace, name))
    api.create(pod(namespace, "foreign", {}))

    async def run(scenario: Callable[[Follower], Awaitable[None]], **watching: Any) -> None:
        proxy, metrics = Proxy(control_plane), Metrics()
        async with proxy.running() as server:
            configuration = Configuration(host=server, api_key={"BearerToken": "Bearer none"})
            monkeypatch.setattr(informer, "load_configuration", AsyncMock(return_value=configuration))
            kube = KubeClient(direct(control_plane), metrics)
            caches = Informers(namespace, WatchHealth(metrics), lambda *change: None)
            follower = Follower(proxy, caches, kube, namespace)
            registry, chosen, stop = kopf.OperatorRegistry(), kopf_settings(), asyncio.Event()
            chosen.process.ultimate_exiting_timeout = None  # else what ends kopf kills this process, later
            for name, value in watching.items():
                setattr(chosen.watching, name, value)
            caches.register(registry)
            operator = kopf.operator(
                registry=registry, settings=chosen, namespaces=[namespace], stop_flag=stop
            )
            follower.ended = asyncio.create_task(operator)
            try:
                await follower.until(lambda: follower.pods.synced)
                await follower.settled()
                assert len(follower.pods) == 3
                await scenario(follower)
            finally:
                stop.set()
                await asyncio.wait({follower.ended}, timeout=SECONDS)
                await caches.close()
                await kube.close()

    def start(scenario: Callable[[Follower], Awaitable[None]], **watching: Any) -> None:
        try:
            asyncio.run(run(scenario, **watching))
        finally:
            gc.collect()  # what kopf's tasks ended with, if it failed, is told here and not at another test

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
    """One pod goes, one changes, one comes, and one is another of the same name."""
    api.delete("Pod", namespace, "one", gracePeriodSeconds=0)
    api.patch("Pod", namespace, "two", {"metadata": {"annotations": {"changed": "yes"}}})
    api.create(pod(namespace, "four"))
    api.delete("Pod", namespace, "three", gracePeriodSeconds=0)
    api.create(pod(namespace, "three"))


def names(cache: ObjectStore) -> list[str]:
    return [body["metadata"]["name"] for body in cache.list()]


def test_a_watch_that_is_cut_loses_no_deletion(following: Any, api: Any, namespace: str) -> None:
    async def scenario(follower: Follower) -> None:
        away = True

        async def refuse(request: web.Request) -> None:
            if away:
                raise ConnectionAbortedError

        lists = follower.proxy.lists.count("pods")
        follower.proxy.fault = refuse
        follower.proxy.cut()
        await asyncio.to_thread(change_everything, api, namespace)
        away = False
        await follower.until(lambda: names(follower.pods) == ["four", "three", "two"])
        await follower.settled()
        assert follower.proxy.lists.count("pods") >= lists

    following(scenario)


def test_what_was_deleted_is_gone_when_all_has_to_be_listed_again(
    following: Any, api: Any, namespace: str
) -> None:
    async def scenario(follower: Follower) -> None:
        expired: set[str] = set()

        async def forget(request: web.Request) -> web.Response | None:
            if "watch" not in request.query or request.path in expired:
                return None
            await changed.wait()
            expired.add(request.path)
            return web.Response(text=json.dumps(GONE) + "\n", content_type="application/json")

        changed = asyncio.Event()
        before = follower.pods.list_count
        follower.proxy.fault = forget
        follower.proxy.cut()
        await asyncio.to_thread(change_everything, api, namespace)
        changed.set()
        await follower.until(lambda: follower.pods.list_count > before and follower.pods.synced)
        assert names(follower.pods) == ["four", "three", "two"]
        await follower.settled()
        api.delete("Pod", namespace, "four", gracePeriodSeconds=0)
        await follower.until(lambda: names(follower.pods) == ["three", "two"])

    following(scenario)


def test_an_api_server_that_fails_ends_nothing(following: Any, api: Any, namespace: str) -> None:
    async def scenario(follower: Follower) -> None:
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

        follower.proxy.fault = fail
        follower.proxy.cut()
        await asyncio.to_thread(change_everything, api, namespace)
        await follower.until(lambda: not any(answers.values()) and not expire)
        await follower.until(lambda: names(follower.pods) == ["four", "three", "two"])
        await follower.settled()

    following(scenario)


def test_a_connection_that_says_nothing_is_left(following: Any, api: Any, namespace: str) -> None:
    async def scenario(follower: Follower) -> None:
        follower.proxy.mute = True
        await asyncio.to_thread(change_everything, api, namespace)
        silent = follower.proxy.watching("pods")
        await follower.until(lambda: not silent & follower.proxy.watching("pods"))
        follower.proxy.mute = False
        await follower.until(lambda: names(follower.pods) == ["four", "three", "two"])

    following(scenario, inactivity_timeout=1.0)


def test_who_takes_over_waits_for_what_is_late(
    following: Any, api: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(informer, "CATCH_UP_SECONDS", 0.5)

    async def scenario(follower: Follower) -> None:
        follower.proxy.mute = True
        await asyncio.to_thread(change_everything, api, namespace)
        silent = follower.proxy.watching("pods")
        waiting = asyncio.create_task(follower.catch_up())
        await follower.until(lambda: not silent & follower.proxy.watching("pods"))
        assert not waiting.done() and "one" in names(follower.pods)
        follower.proxy.mute = False
        await follower.until(waiting.done)
        await waiting
        assert names(follower.pods) == ["four", "three", "two"]

    following(scenario)


def test_who_takes_over_waits_for_nothing_that_has_gone_meanwhile(
    following: Any, api: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod came and went while the watch was cut, in between it was listed: no event tells of it ever."""
    monkeypatch.setattr(informer, "CATCH_UP_SECONDS", 0.5)

    async def scenario(follower: Follower) -> None:
        gone = ObjectList({ObjectName(namespace, "gone"): ObjectVersion("uid of gone", 1)}, 1)
        versions, asked = follower.kube.list_versions, list[str]()

        async def first_with_one_more(ref: ObjectRef, selector: str) -> ObjectList:
            there = await versions(ref, selector)
            if ref.kind != "Pod" or ref.kind in asked:
                return there
            asked.append(ref.kind)
            return ObjectList({**there.objects, **gone.objects}, there.version)

        monkeypatch.setattr(follower.kube, "list_versions", first_with_one_more)
        async with asyncio.timeout(SECONDS):
            await follower.catch_up()
        assert asked == ["Pod"]

    following(scenario)


@pytest.mark.parametrize("refused", [("inferenceservices", "pods", "deployments", "services"), ("pods",)])
def test_what_ends_kopf_ends_the_process_in_order(
    control_plane: ControlPlane, api: Any, namespace: str, tmp_path: Path, refused: tuple[str, ...]
) -> None:
    """A watch that is refused for its age, and not told so within, is what kopf does not live with.

    Nor does it end the watches beside it.
    """

    async def refuse(request: web.Request) -> web.Response | None:
        gone = web.json_response({"kind": "Status", "code": 410}, status=410)
        return gone if "watch" in request.query and request.path.endswith(refused) else None

    def holder() -> str:
        lease = api.find("Lease", namespace, "mizzen-operator")
        return lease["spec"]["holderIdentity"] if lease else "nobody"

    async def scenario() -> None:
        proxy = Proxy(control_plane)
        async with proxy.running() as server:
            options = ("--namespace", namespace, "--lease-namespace", namespace, "--identity", "it")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "mizzen_operator.main", "--health-port", "0", *options),
                env={**os.environ, "KUBECONFIG": str(kubeconfig(tmp_path, server))},
                stderr=(tmp_path / "log").open("wb"),
            )
            try:
                async with asyncio.timeout(SECONDS):
                    while (
                        len(proxy.watches) < len(LABEL_SELECTORS) or await asyncio.to_thread(holder) != "it"
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
    assert "kopf has ended" in log
    assert "re-authenticate" not in log  # as a watcher does that has lost its session and lives on


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
