"""Follows collections of the API server: list, watch, and again, into a cache each."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient

from mizzen_operator import labels
from mizzen_operator.cache import Cache, Changed, Head, Name
from mizzen_operator.kube import JSON, METADATA, USER_AGENT, Ref, error_of, load_configuration
from mizzen_operator.watches import INACTIVITY_SECONDS, SERVER_SECONDS, Watches

logger = logging.getLogger(__name__)

CACHED: Mapping[str, str] = {
    "InferenceService": "",
    "Pod": labels.COMPONENT,
    "Deployment": labels.COMPONENT,
    "Service": labels.COMPONENT,
}
"""Kinds that are followed, and the labels that their objects must have."""
PAGE = 250
LIST_SECONDS = 60.0
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.2, 10.0
CALM_SECONDS = 20.0
"""After this long without a failure, the pauses between tries begin anew."""
SHORTEST_WATCH_SECONDS = 0.3
"""A watch that ends at once begins again no sooner."""
MAX_EVENT_BYTES = 16 * 1024 * 1024
CATCH_UP_SECONDS = 3.0
"""How long events may be late before everything is listed again."""


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _Page(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Expired(Exception):
    """The API server no longer has the version from which to go on."""


def brief(error: Exception) -> str:
    """An error's kind and text, on one line and not too long."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Follower:
    """Keeps the cache of one kind equal to what the API server has."""

    def __init__(self, cache: Cache, namespace: str, watches: Watches) -> None:
        """Follow the kind in a namespace, or in all when it is empty."""
        self.cache = cache
        self._ref = Ref(cache.kind, namespace)
        self._plural = self._ref.path().rpartition("/")[2]
        self._selector = CACHED[cache.kind]
        self._watches = watches
        self._session: asyncio.Task[None] | None = None
        self._again = False

    async def run(self) -> None:
        """Follow until cancelled. An API server that is away changes nothing in the cache."""
        wait = FIRST_BACKOFF_SECONDS
        while True:
            began = time.monotonic()
            self._session = asyncio.create_task(self._follow(), name=f"follow {self._plural}")
            try:
                await self._session
            except _Expired:
                logger.info("%s are listed again", self._plural)
            except asyncio.CancelledError:
                self._session.cancel()
                if not self._again:
                    raise
            except Exception as error:  # whatever it is, the watch must go on
                self._watches.answered(self._plural, False)
                logger.warning("cannot watch %s: %s; again in %.1f s", self._plural, brief(error), wait)
            if self._again:
                self._again = False
                continue
            if time.monotonic() - began > CALM_SECONDS:
                wait = FIRST_BACKOFF_SECONDS
            await asyncio.sleep(wait * random.uniform(0.75, 1.25))
            wait = min(2 * wait, MAX_BACKOFF_SECONDS)

    def list_again(self) -> None:
        """Leave the watch and list everything anew."""
        self.cache.synced = False
        if self._session is not None and not self._session.done():
            self._again = True
            self._session.cancel()

    async def _follow(self) -> None:
        """List, then watch for as long as that goes well.

        Raises:
            _Expired: list again.
        """
        async with ApiClient(await load_configuration()) as api:
            api.user_agent = USER_AGENT
            version = await self._list(api)
            while True:
                began = time.monotonic()
                version = await self._watch(api, version)
                await asyncio.sleep(max(0.0, SHORTEST_WATCH_SECONDS - (time.monotonic() - began)))

    async def versions(self, api: ApiClient) -> tuple[dict[Name, tuple[str, int]], int]:
        """Uid and version of everything that is there now, and the version of the list.

        Raises:
            KubeError, aiohttp.ClientError, TimeoutError: the API server failed.
        """
        there: dict[Name, tuple[str, int]] = {}
        version = 0
        async for page in self._pages(api, METADATA):
            version = int(page.metadata.resource_version)
            for item in page.items or ():
                meta = msgspec.json.decode(item, type=Head).metadata
                there[Name(meta.namespace, meta.name)] = (meta.uid, int(meta.resource_version))
        return there, version

    async def _list(self, api: ApiClient) -> str:
        names: list[Name] = []
        version = ""
        async for page in self._pages(api, JSON):
            for item in page.items or ():
                meta = msgspec.json.decode(item, type=Head).metadata
                names.append(Name(meta.namespace, meta.name))
                self.cache.put(item)
            version = page.metadata.resource_version
            self._watches.answered(self._plural, True)
        self.cache.listed(names, int(version))
        return version

    async def _pages(self, api: ApiClient, accept: str) -> AsyncIterator[_Page]:
        """A list in parts, which all show the same version."""
        more = ""
        while True:
            query = {"limit": str(PAGE), **({"continue": more} if more else {})}
            async with asyncio.timeout(LIST_SECONDS):
                timeout = aiohttp.ClientTimeout(total=LIST_SECONDS)
                response = await self._get(api, query, timeout, accept)
                page = msgspec.json.decode(await response.read(), type=_Page)
            yield page
            more = page.metadata.continue_
            if not more:
                return

    async def _watch(self, api: ApiClient, version: str) -> str:
        """Follow the changes since a version; returns the version where the watch ended.

        Raises:
            _Expired: list again.
        """
        seconds = int(SERVER_SECONDS * random.uniform(0.8, 1.0))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=INACTIVITY_SECONDS)
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        response = await self._get(api, query, timeout)
        self._watches.answered(self._plural, True)
        try:
            async for line in lines(response):
                event = msgspec.json.decode(line, type=_Event)
                if event.type == "ERROR":
                    raise _Expired
                version = msgspec.json.decode(event.object, type=Head).metadata.resource_version
                if event.type == "DELETED":
                    self.cache.remove(event.object)
                elif event.type != "BOOKMARK":
                    self.cache.put(event.object)
                self._watches.event(self._plural)
        finally:
            response.close()
        return version

    async def _get(
        self, api: ApiClient, query: Mapping[str, str], timeout: aiohttp.ClientTimeout, accept: str = JSON
    ) -> aiohttp.ClientResponse:
        """The response to a list or watch, its body not read yet."""
        given = [*query.items(), *([("labelSelector", self._selector)] if self._selector else [])]
        request = await api.param_serialize(
            "GET",
            self._ref.path(),
            query_params=given,
            header_params={"Accept": accept},
            auth_settings=["BearerToken"],
        )
        response: Any = (await api.call_api(*request, _request_timeout=timeout)).response
        if response.status == 410:
            raise _Expired
        if response.status >= 400:
            raise error_of(response.status, await response.read(), f"GET {self._ref.path()}")
        return response


class Caches:
    """The caches of all kinds that are followed, and what keeps them."""

    def __init__(self, namespace: str, watches: Watches, on_change: Changed) -> None:
        self._caches = {kind: Cache(kind, on_change) for kind in CACHED}
        self._followers = [Follower(cache, namespace, watches) for cache in self._caches.values()]
        self._tasks: list[asyncio.Task[None]] = []

    def get(self, kind: str) -> Cache | None:
        """The cache of a kind; None for one that is not followed."""
        return self._caches.get(kind)

    def start(self) -> None:
        """Begin to follow."""
        self._tasks = [asyncio.create_task(one.run(), name=one.cache.kind) for one in self._followers]

    async def close(self) -> None:
        """Stop following."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def catch_up(self) -> None:
        """Wait until everything is held that the API server has now.

        A replica that takes over must not act on a state from before its predecessor's last writes. A kind
        whose events are late is listed again.

        Raises:
            KubeError, aiohttp.ClientError, TimeoutError: the API server failed.
        """
        async with ApiClient(await load_configuration()) as api:
            api.user_agent = USER_AGENT
            await asyncio.gather(*(self._catch_up(one, api) for one in self._followers))

    async def _catch_up(self, follower: Follower, api: ApiClient) -> None:
        cache = follower.cache
        await cache.until(lambda: cache.synced)
        there, version = await follower.versions(api)
        try:
            async with asyncio.timeout(CATCH_UP_SECONDS):
                await cache.until(lambda: cache.reflects(there, version))
        except TimeoutError:
            logger.info("events of %s are late: all are listed again", cache.kind)
            follower.list_again()
            await cache.until(lambda: cache.synced)


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the lines of a response, of any length up to MAX_EVENT_BYTES.

    Raises:
        ValueError: a line is longer.
    """
    rest = b""
    async for part in response.content.iter_any():
        if b"\n" not in part:
            rest += part
        else:
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                if line:
                    yield line
        if len(rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of the watch has more than {MAX_EVENT_BYTES} bytes")
