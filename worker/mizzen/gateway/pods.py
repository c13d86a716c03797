"""Engines as the pods of a service: list, then watch, then again; the last known set stays meanwhile."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from kubernetes.aio import client
from kubernetes.aio import config as kube_config

from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.engines import Found
from mizzen.gateway.metrics import Metrics

log = logging.getLogger(__name__)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WATCH_SECONDS = 240
"""A watch ends after this long and begins again where it was."""
IDLE_SECONDS = 90.0
"""A watch that sends nothing, not even a bookmark (one a minute), for this long is dead."""
LIST_SECONDS = 30.0
FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 10.0
CALM_SECONDS = 20.0
"""After a list and watches that went well for this long, the pauses between tries begin anew."""
SHORTEST_WATCH_SECONDS = 0.3
"""A watch that ends at once begins again no sooner."""
MAX_EVENT_BYTES = 16 * 1024 * 1024


class Metadata(msgspec.Struct, rename="camel"):
    """Metadata of a pod."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}


class Port(msgspec.Struct, rename="camel"):
    """A port of a container."""

    container_port: int
    name: str = ""


class Container(msgspec.Struct):
    """A container of a pod."""

    ports: list[Port] | None = None


class Spec(msgspec.Struct):
    """Spec of a pod; a bookmark's has null for containers."""

    containers: list[Container] | None = None


class Condition(msgspec.Struct):
    """A condition of a pod."""

    type: str
    status: str


class Status(msgspec.Struct, rename="camel"):
    """Status of a pod."""

    phase: str = ""
    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    conditions: list[Condition] | None = None


class Pod(msgspec.Struct):
    """A pod, as far as discovery looks at it."""

    metadata: Metadata
    spec: Spec = msgspec.field(default_factory=Spec)
    status: Status = msgspec.field(default_factory=Status)


class PodList(msgspec.Struct):
    """A list of pods."""

    metadata: Metadata
    items: list[Pod] | None = None


class WatchEvent(msgspec.Struct):
    """An event of a watch."""

    type: str
    object: msgspec.Raw


class Expired(Exception):
    """The API server no longer has the version from which to watch."""


class PodWatch:
    """Keeps the routing table equal to the engine pods of one service."""

    def __init__(
        self, config: GatewayConfig, sync: Callable[[Iterable[Found]], None], metrics: Metrics
    ) -> None:
        """Find the namespace.

        Raises:
            ValueError: it is neither given nor known from the pod.
        """
        self._namespace = namespace(config.namespace)
        self._selector = (
            f"mizzen.dev/service={config.service or config.served_name},mizzen.dev/component=engine"
        )
        self._sync = sync
        self._metrics = metrics
        self._pods: dict[str, Pod] = {}
        self._decode_event = msgspec.json.Decoder(WatchEvent).decode
        self._decode_pod = msgspec.json.Decoder(Pod).decode

    async def run(self) -> None:
        """Watch until cancelled. An API server that is away changes nothing in the table."""
        wait = FIRST_BACKOFF_SECONDS
        while True:
            began = time.monotonic()
            try:
                await self._follow()
            except Expired:
                log.info("pods are listed again")
            except Exception as error:  # whatever it is, the watch must go on
                self._metrics.watch_errors.inc()
                fields = {"reason": f"{type(error).__name__}: {brief(error)}", "again_in_seconds": wait}
                log.warning("pods cannot be watched", extra={"fields": fields})
            if time.monotonic() - began > CALM_SECONDS:
                wait = FIRST_BACKOFF_SECONDS
            await asyncio.sleep(wait * (0.75 + 0.5 * random.random()))
            wait = min(2 * wait, MAX_BACKOFF_SECONDS)

    async def _follow(self) -> None:
        """List, then watch for as long as that goes well.

        Raises:
            Expired: list again.
        """
        async with await connect() as api:
            version = await self._list(api)
            while True:
                began = time.monotonic()
                version = await self._watch(api, version)
                await asyncio.sleep(max(0.0, SHORTEST_WATCH_SECONDS - (time.monotonic() - began)))

    async def _list(self, api: client.ApiClient) -> str:
        async with asyncio.timeout(LIST_SECONDS):
            response = await self._get(api, aiohttp.ClientTimeout(total=LIST_SECONDS))
            listed = msgspec.json.decode(await response.read(), type=PodList)
        self._pods = {pod.metadata.uid: pod for pod in listed.items or ()}
        self._report()
        return listed.metadata.resource_version

    async def _watch(self, api: client.ApiClient, version: str) -> str:
        """Follow the changes since a version; return the version where the watch ended.

        Raises:
            Expired: list again.
        """
        seconds = int(WATCH_SECONDS * random.uniform(0.8, 1.2))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=IDLE_SECONDS)
        options = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        response = await self._get(api, timeout, timeoutSeconds=str(seconds), **options)
        try:
            async for line in lines(response):
                event = self._decode_event(line)
                if event.type == "ERROR":
                    raise Expired
                pod = self._decode_pod(event.object)
                version = pod.metadata.resource_version
                if event.type != "BOOKMARK":
                    self._take(event.type, pod)
        finally:
            response.close()
        return version

    def _take(self, kind: str, pod: Pod) -> None:
        if kind == "DELETED":
            self._pods.pop(pod.metadata.uid, None)
        else:
            self._pods[pod.metadata.uid] = pod
        self._report()

    def _report(self) -> None:
        self._sync([found for pod in self._pods.values() if (found := engine(pod)) is not None])

    async def _get(self, api: client.ApiClient, timeout: aiohttp.ClientTimeout, **options: str) -> Any:
        """Return the response to a list or watch, its body not read yet.

        The generated method would check the types of its arguments and let no timeout of a pause through.
        """
        request = await api.param_serialize(
            "GET",
            "/api/v1/namespaces/{namespace}/pods",
            path_params={"namespace": self._namespace},
            query_params=[("labelSelector", self._selector), *options.items()],
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        response: Any = (await api.call_api(*request, _request_timeout=timeout)).response
        if response.status == 410:
            raise Expired
        if response.status >= 400:
            text = (await response.read())[:300].decode(errors="replace")
            raise client.ApiException(status=response.status, reason=text)
        return response


def engine(pod: Pod) -> Found | None:
    """Return a pod's engine; None before its containers are ready, without address or port, or once ended.

    A pod that is being deleted is reported as terminating, so that what runs there can end.
    """
    conditions = {condition.type: condition.status for condition in pod.status.conditions or ()}
    port = next(
        (p.container_port for c in pod.spec.containers or () for p in c.ports or () if p.name == "wire"), None
    )
    terminating = pod.metadata.deletion_timestamp is not None
    ready = terminating or conditions.get("ContainersReady") == "True"
    if not ready or port is None or not pod.status.pod_ip or pod.status.phase in ("Succeeded", "Failed"):
        return None
    host = f"[{pod.status.pod_ip}]" if ":" in pod.status.pod_ip else pod.status.pod_ip
    return Found(
        name=pod.metadata.name,
        uid=pod.metadata.uid,
        endpoint=f"tcp://{host}:{port}",
        revision=pod.metadata.labels.get("mizzen.dev/revision", ""),
        terminating=terminating,
    )


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the lines of a response, of any length up to MAX_EVENT_BYTES."""
    rest = bytearray()
    async for part in response.content.iter_any():
        rest += part
        *whole, last = bytes(rest).split(b"\n") if b"\n" in part else (rest,)
        for line in whole:
            if line.strip():
                yield line
        rest = bytearray(last)
        if len(rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of the watch has more than {MAX_EVENT_BYTES} bytes")


async def connect() -> client.ApiClient:
    """Return a client by $KUBECONFIG when it is set, else by the pod's service account."""
    configuration = client.Configuration()
    path = os.environ.get("KUBECONFIG")
    if path:
        await kube_config.load_kube_config(path, client_configuration=configuration, persist_config=False)
    else:
        kube_config.load_incluster_config(client_configuration=configuration)
    return client.ApiClient(configuration)


def namespace(given: str) -> str:
    """Return the namespace whose pods are watched.

    Raises:
        ValueError: it is neither given nor known from the pod.
    """
    found = given or os.environ.get("POD_NAMESPACE", "")
    mounted = SERVICE_ACCOUNT / "namespace"
    if not found and mounted.is_file():
        found = mounted.read_text().strip()
    if not found:
        raise ValueError("--namespace is needed outside a pod (or give engines by --engine)")
    return found


def brief(error: Exception) -> str:
    """Return an error's text, on one line and not too long."""
    return " ".join(str(error).split())[:300]
