# SPDX-License-Identifier: Apache-2.0
"""List and watch: follows a collection of Kubernetes objects for the lifetime of the gateway."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from kubernetes.aio import client
from kubernetes.aio import config as kube_config

from mizzen.common.proxies import proxy_for

log = logging.getLogger(__name__)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WATCH_SECONDS = 240
"""Mean duration of a watch request; the next one continues from the resource version where it ended."""
IDLE_SECONDS = 90.0
"""Time without an event after which a watch counts as dead; bookmarks arrive about once a minute."""
LIST_SECONDS = 30.0
FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 10.0
BACKOFF_RESET_SECONDS = 20.0
"""If a list and its watches ran for longer than this, the next back-off starts from its minimum again."""
EARLY_END_FRACTION = 0.9
"""A watch that lasted for less than this fraction of its duration is followed by a list."""
MIN_WATCH_SECONDS = 0.3
"""Shortest time between the starts of two watches."""
MAX_EVENT_BYTES = 16 * 1024 * 1024


class Metadata(msgspec.Struct, rename="camel"):
    """Metadata of an object."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}


class WatchedObject(Protocol):
    """Interface to a decoded Kubernetes object; all kinds have metadata."""

    metadata: Metadata


W = TypeVar("W", bound=WatchedObject)


class ObjectList(msgspec.Struct):
    """List of objects."""

    metadata: Metadata
    items: list[msgspec.Raw] | None = None


class WatchEvent(msgspec.Struct):
    """Event of a watch."""

    type: str
    object: msgspec.Raw


class ResourceVersionExpired(Exception):
    """The API server no longer has the events after a resource version (410 Gone), or may have lost them.

    If etcd is restored from a backup, resource versions go back. A watch from a later version is accepted
    all the same, but sends no events until the versions have caught up.
    """


class ResourceWatch(Generic[W]):
    """Follows a collection of objects, and reports all of them after each change.

    While the API server is unavailable, the last state stays in force.
    """

    def __init__(
        self,
        namespace: str,
        plural: str,
        kind: type[W],
        on_change: Callable[[Collection[W]], None],
        on_error: Callable[[], None],
        **selectors: str,
    ) -> None:
        """Create a watch; `run` starts it.

        Args:
            namespace: namespace of the objects.
            plural: plural name of their resource in the core API, such as `pods`.
            kind: type to which the objects are decoded.
            on_change: called with all objects after each change.
            on_error: called when a list or watch request has failed.
            selectors: query parameters `labelSelector` or `fieldSelector`.
        """
        self._namespace = namespace
        self._plural = plural
        self._on_change = on_change
        self._on_error = on_error
        self._selectors = selectors
        self._objects: dict[str, W] = {}
        self._proxy = ""
        """URL of the proxy through which the API server is reached; empty for a direct connection."""
        self._decode_event = msgspec.json.Decoder(WatchEvent).decode
        self._decode = msgspec.json.Decoder(kind).decode

    async def run(self) -> None:
        """Watch until cancelled."""
        wait = FIRST_BACKOFF_SECONDS
        while True:
            began = time.monotonic()
            try:
                await self._follow()
            except ResourceVersionExpired:
                log.info("watch expired, listing again", extra={"fields": {"resource": self._plural}})
            except Exception as error:  # the watch must continue after any error
                self._on_error()
                reason = f"{type(error).__name__}: {short_error(error)}"
                if self._proxy:
                    reason += f" (through the proxy {urlsplit(self._proxy).netloc.rpartition('@')[2]})"
                fields = {"resource": self._plural, "reason": reason, "again_in_seconds": wait}
                log.warning("cannot watch", extra={"fields": fields})
            if time.monotonic() - began > BACKOFF_RESET_SECONDS:
                wait = FIRST_BACKOFF_SECONDS
            await asyncio.sleep(wait * (0.75 + 0.5 * random.random()))
            wait = min(2 * wait, MAX_BACKOFF_SECONDS)

    async def _follow(self) -> None:
        """List the objects, then watch them until an error.

        Raises:
            ResourceVersionExpired: the caller must list again.
        """
        async with await connect() as api:
            self._proxy = api.configuration.proxy or ""
            version = await self._list(api)
            while True:
                began, seconds = time.monotonic(), int(WATCH_SECONDS * random.uniform(0.8, 1.2))
                version = await self._watch(api, version, seconds)
                lasted = time.monotonic() - began
                if lasted < EARLY_END_FRACTION * seconds:  # the API server may have restarted
                    raise ResourceVersionExpired
                await asyncio.sleep(max(0.0, MIN_WATCH_SECONDS - lasted))

    async def _list(self, api: client.ApiClient) -> str:
        async with asyncio.timeout(LIST_SECONDS):
            response = await self._get(api, aiohttp.ClientTimeout(total=LIST_SECONDS))
            object_list = msgspec.json.decode(await response.read(), type=ObjectList)
        objects = [self._decode(item) for item in object_list.items or ()]
        self._objects = {item.metadata.uid: item for item in objects}
        self._report()
        return object_list.metadata.resource_version

    async def _watch(self, api: client.ApiClient, version: str, seconds: int) -> str:
        """Follow the changes since a resource version for some time; return the version where it ended.

        Raises:
            ResourceVersionExpired: the caller must list again.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=IDLE_SECONDS)
        options = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        response = await self._get(api, timeout, timeoutSeconds=str(seconds), **options)
        try:
            async for line in read_lines(response):
                event = self._decode_event(line)
                if event.type == "ERROR":
                    raise ResourceVersionExpired
                changed = self._decode(event.object)
                if is_older(changed.metadata.resource_version, version):
                    raise ResourceVersionExpired
                version = changed.metadata.resource_version
                if event.type != "BOOKMARK":
                    self._apply(event.type, changed)
        finally:
            response.close()
        return version

    def _apply(self, kind: str, changed: W) -> None:
        if kind == "DELETED":
            self._objects.pop(changed.metadata.uid, None)
        else:
            self._objects[changed.metadata.uid] = changed
        self._report()

    def _report(self) -> None:
        self._on_change(tuple(self._objects.values()))

    async def _get(self, api: client.ApiClient, timeout: aiohttp.ClientTimeout, **options: str) -> Any:
        """Return the response to a list or watch request; its body is not read yet.

        The generated client methods are not used, because they check argument types and do not support a
        timeout between two reads.

        Raises:
            ResourceVersionExpired: the status is 410.
            ApiException: the status is another error.
        """
        request = await api.param_serialize(
            "GET",
            "/api/v1/namespaces/{namespace}/{plural}",
            path_params={"namespace": self._namespace, "plural": self._plural},
            query_params=[*self._selectors.items(), *options.items()],
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        response: Any = (await api.call_api(*request, _request_timeout=timeout)).response
        if response.status == 410:
            raise ResourceVersionExpired
        if response.status >= 400:
            text = (await response.read())[:300].decode(errors="replace")
            raise client.ApiException(status=response.status, reason=text)
        return response


async def read_lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the non-empty lines of a response.

    Raises:
        ValueError: a line is longer than `MAX_EVENT_BYTES`.
    """
    pending = bytearray()
    async for part in response.content.iter_any():
        pending += part
        *complete_lines, last = bytes(pending).split(b"\n") if b"\n" in part else (pending,)
        for line in complete_lines:
            if line.strip():
                yield line
        pending = bytearray(last)
        if len(pending) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of the watch has more than {MAX_EVENT_BYTES} bytes")


def is_older(version: str, other: str) -> bool:
    """Return whether a resource version is older than another; False if they cannot be compared."""
    return version.isdecimal() and other.isdecimal() and int(version) < int(other)


async def connect() -> client.ApiClient:
    """Return an API client that uses $KUBECONFIG if it is set, else the pod's service account.

    It uses the proxy that the kubeconfig or the environment names, as other Kubernetes clients do.
    """
    configuration = client.Configuration()
    path = os.environ.get("KUBECONFIG")
    if path:
        await kube_config.load_kube_config(path, client_configuration=configuration, persist_config=False)
    else:
        kube_config.load_incluster_config(client_configuration=configuration)
    configuration.proxy = configuration.proxy or proxy_for(configuration.host, os.environ)
    # aiohttp itself would ignore networks in NO_PROXY.
    configuration.client_session_kwargs = {"trust_env": False}
    return client.ApiClient(configuration)


def watched_namespace(configured: str) -> str:
    """Return the namespace to watch: `configured` or, if it is empty, the namespace of the gateway's pod.

    Raises:
        ValueError: the namespace is not configured, and the gateway does not run in a pod.
    """
    namespace = configured or os.environ.get("POD_NAMESPACE", "")
    mounted = SERVICE_ACCOUNT / "namespace"
    if not namespace and mounted.is_file():
        namespace = mounted.read_text().strip()
    if not namespace:
        raise ValueError("outside a pod, give --namespace (or the engines by --engine)")
    return namespace


def short_error(error: Exception) -> str:
    """Return the text of an error as one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]
