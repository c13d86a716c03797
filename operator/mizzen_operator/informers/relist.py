# SPDX-License-Identifier: Apache-2.0
"""HTTP session through which kopf lists and watches; it reads the lists before kopf does.

kopf lists a collection, handles its objects one by one, watches from there, and lists again once the API
server has forgotten the watch's version. kopf does not report objects that were deleted in between. The list
reveals them, so the session reads it first. Many error responses would make kopf exit; the session makes kopf
pause and retry instead.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
import msgspec
from kubernetes.aio.client import Configuration

from mizzen_operator.informers.watch_health import WatchHealth
from mizzen_operator.kube.errors import describe_error
from mizzen_operator.kube.paged_list import ObjectList
from mizzen_operator.kube.transport import authorization, open_session

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.2, 10.0
MIN_WATCH_INTERVAL_SECONDS = 0.3
"""Minimum time between two starts of a watch; it prevents a busy loop if each watch ends at once."""
HANDLED_BY_KOPF = (401, 429)
"""Status codes that kopf handles itself: it logs in again after 401, and waits after 429."""
GONE = 410
"""Status code that makes kopf exit if a watch gets it; the new process then lists all objects.

A list that gets it is retried.
"""
END_SECONDS = 5.0
"""Maximum time to wait for cancelled watchers to end."""


@dataclass(slots=True)
class _ResourceStream:
    """State of kopf's list and watch of one kind."""

    on_list: Callable[[ObjectList], None]
    object_list: ObjectList = field(default_factory=ObjectList)
    watch: aiohttp.ClientResponse | None = None
    watcher: asyncio.Task[object] | None = None
    """kopf's task that lists and watches."""
    watch_started: float = 0.0
    backoff: float = FIRST_BACKOFF_SECONDS


class KopfSessionInterceptor:
    """Intercepts the requests and responses between kopf and the API server."""

    def __init__(self, health: WatchHealth, on_list: Mapping[str, Callable[[ObjectList], None]]) -> None:
        """Create an interceptor for some kinds; requests for other kinds pass unchanged.

        Args:
            health: records whether each list and watch succeeds.
            on_list: function to call with each complete list, by the kind's plural.
        """
        self._health = health
        self._streams = {plural: _ResourceStream(on_list) for plural, on_list in on_list.items()}
        self._connectors: list[aiohttp.BaseConnector] = []

    async def create_session(self, configuration: Configuration) -> aiohttp.ClientSession:
        """Create a session with a configuration's credentials.

        kopf closes the session as soon as the API server rejects its credentials. The connections stay open
        for the other requests, because a watch that lost its connection at that moment would make kopf exit.
        """

        async def middleware(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            request.headers.update(await authorization(configuration))
            try:
                return await self._intercept(request, handler)
            except (AssertionError, AttributeError) as error:
                if not session.closed:
                    raise
                # A request of a closed session fails like this; kopf handles RuntimeError by logging in.
                raise RuntimeError("the session was closed") from error

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        session = open_session(configuration, timeout, (middleware,), owner=False)
        if session.connector is not None:
            self._connectors.append(session.connector)
        while len(self._connectors) > 2:
            await self._connectors.pop(0).close()
        return session

    async def close(self) -> None:
        """Cancel the watchers and close all connections.

        If one watcher fails, kopf cancels not only the other watchers, but also the tasks that they wait for.
        A watcher that has no connection at that moment mistakes the cancellation for a pause, and restarts
        forever.
        """
        watchers = {stream.watcher for stream in self._streams.values() if stream.watcher is not None}
        for watcher in watchers:
            watcher.cancel()
        if watchers:
            await asyncio.wait(watchers, timeout=END_SECONDS)
        while self._connectors:
            await self._connectors.pop().close()

    def restart_watch(self, plural: str) -> None:
        """Cut the watch of a kind; kopf resumes it from the same version."""
        watch = self._streams[plural].watch
        if watch is not None:
            watch.close()

    async def _intercept(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Forward a request to the API server; record listed objects, and whether the request succeeded.

        Raises:
            aiohttp.ClientPayloadError: a list or watch failed and its back-off has passed; kopf now retries.
        """
        plural = request.url.path.rpartition("/")[2]
        if plural not in self._streams:
            return await handler(request)
        stream = self._streams[plural]
        stream.watcher = asyncio.current_task()
        watching = "watch" in request.url.query
        try:
            if watching:
                await _throttle_watch(stream)
            response = await handler(request)
            if response.status in HANDLED_BY_KOPF or (watching and response.status == GONE):
                self._health.record_response(plural, False)
                return response
            if response.status != 200:
                raise aiohttp.ClientPayloadError(await _error_text(response))
            if watching:
                stream.watch = response
            else:
                _record_page(stream, await response.read(), "continue" in request.url.query)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            self._health.record_response(plural, False)
            operation = f"{'watch' if watching else 'list'} {plural}"
            pause = stream.backoff * random.uniform(0.75, 1.25)
            stream.backoff = min(2 * stream.backoff, MAX_BACKOFF_SECONDS)
            logger.warning("cannot %s: %s; retrying in %.1f s", operation, describe_error(error), pause)
            await asyncio.sleep(pause)
            raise aiohttp.ClientPayloadError(str(error)) from error
        stream.backoff = FIRST_BACKOFF_SECONDS
        self._health.record_response(plural, True)
        return response


async def _throttle_watch(stream: _ResourceStream) -> None:
    """Wait until MIN_WATCH_INTERVAL_SECONDS have passed since the watch was last started."""
    await asyncio.sleep(max(0.0, stream.watch_started + MIN_WATCH_INTERVAL_SECONDS - time.monotonic()))
    stream.watch_started = time.monotonic()


def _record_page(stream: _ResourceStream, page: bytes, continued: bool) -> None:
    if not continued:
        stream.object_list = ObjectList()
    stream.object_list.add_page(page)
    if not stream.object_list.continue_token:
        stream.on_list(stream.object_list)
        stream.object_list = ObjectList()


async def _error_text(response: aiohttp.ClientResponse) -> str:
    return f"{response.status} {(await response.read()).decode(errors='replace')}"
