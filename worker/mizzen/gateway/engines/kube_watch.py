"""List and watch: a collection of the Kubernetes API, followed for as long as the gateway lives."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import aiohttp
import msgspec
from kubernetes.aio import client
from kubernetes.aio import config as kube_config

log = logging.getLogger(__name__)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WATCH_SECONDS = 240
"""A watch ends after this long and begins again where it was."""
IDLE_SECONDS = 90.0
"""A watch that sends nothing, not even a bookmark (one a minute), for this long is dead."""
LIST_SECONDS = 30.0
FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 10.0
BACKOFF_RESET_SECONDS = 20.0
"""After a list and watches that went well for this long, the pauses between tries begin anew."""
MIN_WATCH_SECONDS = 0.3
"""A watch that ends at once begins again no sooner."""
MAX_EVENT_BYTES = 16 * 1024 * 1024


class Metadata(msgspec.Struct, rename="camel"):
    """Metadata of an object."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}


class WatchedObject(Protocol):
    """An object of the API, as far as it is looked at."""

    metadata: Metadata


W = TypeVar("W", bound=WatchedObject)


class ObjectList(msgspec.Struct):
    """A list of objects."""

    metadata: Metadata
    items: list[msgspec.Raw] | None = None


class WatchEvent(msgspec.Struct):
    """An event of a watch."""

    type: str
    object: msgspec.Raw


class ResourceVersionExpired(Exception):
    """The API server no longer has the version from which to watch."""


class ResourceWatch(Generic[W]):
    """Tells `on_change` of a collection and its changes; an API server that is away changes nothing."""

    def __init__(
        self,
        watched_namespace: str,
        plural: str,
        kind: type[W],
        on_change: Callable[[Collection[W]], None],
        on_error: Callable[[], None],
        **selectors: str,
    ) -> None:
        """Follow the objects of `plural` (of the core API) in a namespace.

        Args:
            kind: what they are decoded as.
            on_change: called with all objects after each change.
            on_error: called when a list or watch has failed.
            selectors: `labelSelector` or `fieldSelector`.
        """
        self._namespace = watched_namespace
        self._plural = plural
        self._on_change = on_change
        self._on_error = on_error
        self._selectors = selectors
        self._objects: dict[str, W] = {}
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
                log.info("listed again", extra={"fields": {"resource": self._plural}})
            except Exception as error:  # whatever it is, the watch must go on
                self._on_error()
                reason = f"{type(error).__name__}: {short_error(error)}"
                fields = {"resource": self._plural, "reason": reason, "again_in_seconds": wait}
                log.warning("cannot watch", extra={"fields": fields})
            if time.monotonic() - began > BACKOFF_RESET_SECONDS:
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
                await asyncio.sleep(max(0.0, MIN_WATCH_SECONDS - (time.monotonic() - began)))

    async def _list(self, api: client.ApiClient) -> str:
        async with asyncio.timeout(LIST_SECONDS):
            response = await self._get(api, aiohttp.ClientTimeout(total=LIST_SECONDS))
            listed = msgspec.json.decode(await response.read(), type=ObjectList)
        found = [self._decode(item) for item in listed.items or ()]
        self._objects = {one.metadata.uid: one for one in found}
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
            async for line in read_lines(response):
                event = self._decode_event(line)
                if event.type == "ERROR":
                    raise ResourceVersionExpired
                changed = self._decode(event.object)
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
        """Return the response to a list or watch, its body not read yet.

        The generated method would check the types of its arguments and let no timeout of a pause through.
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


def watched_namespace(given: str) -> str:
    """Return the namespace that is watched.

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


def short_error(error: Exception) -> str:
    """Return an error's text, on one line and not too long."""
    return " ".join(str(error).split())[:300]
