"""The HTTP session by which kopf lists and watches, and what can be learnt from what passes through it.

kopf lists a collection, tells its objects one by one, watches from there, and lists again when the API server
has forgotten where the watch was. What ended in between it does not tell; the list itself does, which is read
here before kopf gets it. And some answers kopf takes for the end of everything: here they are a pause.
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

from mizzen_operator.informers.watch_health import Watches
from mizzen_operator.kube.errors import describe_error
from mizzen_operator.kube.paged_list import ObjectList
from mizzen_operator.kube.transport import authorization, open_session

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.2, 10.0
SHORTEST_WATCH_SECONDS = 0.3
"""A watch that ends at once begins again no sooner."""
LEFT_TO_KOPF = (401, 429)
"""Answers that kopf acts on itself: it logs in anew, or waits."""
GONE = 410
"""Ends kopf where it answers a watch, so that a fresh process lists all; a list begins anew."""
END_SECONDS = 5.0
"""How long a watcher may take to end."""


@dataclass(slots=True)
class _Collection:
    """What passes between kopf and the API server about one kind."""

    on_list: Callable[[ObjectList], None]
    listing: ObjectList = field(default_factory=ObjectList)
    watch: aiohttp.ClientResponse | None = None
    watcher: asyncio.Task[object] | None = None
    """kopf's task that lists and watches."""
    began: float = 0.0
    pause: float = FIRST_PAUSE_SECONDS


class Traffic:
    """All that passes between kopf and the API server."""

    def __init__(self, watches: Watches, on_list: Mapping[str, Callable[[ObjectList], None]]) -> None:
        """Notes answers.

        Args:
            watches: told of each list's and watch's answer.
            on_list: by the plural of a kind, gets each list of its objects that was read whole.
        """
        self._watches = watches
        self._collections = {plural: _Collection(took) for plural, took in on_list.items()}
        self._connectors: list[aiohttp.BaseConnector] = []

    async def session(self, configuration: Configuration) -> aiohttp.ClientSession:
        """A session with a configuration's credentials.

        kopf closes it when a request is refused for its credentials, whatever else runs on it. What runs goes
        on: a watch whose connection broke just then would end kopf.
        """

        async def relay(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            request.headers.update(await authorization(configuration))
            try:
                return await self._relay(request, handler)
            except (AssertionError, AttributeError) as error:
                if not session.closed:
                    raise
                # So aiohttp fails in the midst of a request; kopf takes this as what it is: it logs in anew.
                raise RuntimeError("the session was closed") from error

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        session = open_session(configuration, timeout, (relay,), owner=False)
        if session.connector is not None:
            self._connectors.append(session.connector)
        while len(self._connectors) > 2:
            await self._connectors.pop(0).close()
        return session

    async def close(self) -> None:
        """End who watches and break all connections.

        When one watcher fails, kopf forgets the others until it stops them together with what they wait on.
        One that has lost its connection by then takes its own end for a pause, and begins anew for ever.
        """
        watchers = {one.watcher for one in self._collections.values() if one.watcher is not None}
        for watcher in watchers:
            watcher.cancel()
        if watchers:
            await asyncio.wait(watchers, timeout=END_SECONDS)
        while self._connectors:
            await self._connectors.pop().close()

    def watch_anew(self, plural: str) -> None:
        """Cut the watch of a kind; kopf takes it up again where it was."""
        watch = self._collections[plural].watch
        if watch is not None:
            watch.close()

    async def _relay(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Pass on a request.

        Raises:
            aiohttp.ClientPayloadError: a list or a watch failed, and a pause has passed; kopf tries again.
        """
        plural = request.url.path.rpartition("/")[2]
        if plural not in self._collections:
            return await handler(request)
        collection = self._collections[plural]
        collection.watcher = asyncio.current_task()
        watching = "watch" in request.url.query
        try:
            if watching:
                await _rest(collection)
            response = await handler(request)
            if response.status in LEFT_TO_KOPF or (watching and response.status == GONE):
                self._watches.answered(plural, False)
                return response
            if response.status != 200:
                raise aiohttp.ClientPayloadError(await _reason(response))
            if watching:
                collection.watch = response
            else:
                _read(collection, await response.read(), "continue" in request.url.query)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            self._watches.answered(plural, False)
            what = f"{'watch' if watching else 'list'} {plural}"
            pause = collection.pause * random.uniform(0.75, 1.25)
            collection.pause = min(2 * collection.pause, MAX_PAUSE_SECONDS)
            logger.warning("cannot %s: %s; again in %.1f s", what, describe_error(error), pause)
            await asyncio.sleep(pause)
            raise aiohttp.ClientPayloadError(str(error)) from error
        collection.pause = FIRST_PAUSE_SECONDS
        self._watches.answered(plural, True)
        return response


async def _rest(collection: _Collection) -> None:
    """Wait until a watch may begin again."""
    await asyncio.sleep(max(0.0, collection.began + SHORTEST_WATCH_SECONDS - time.monotonic()))
    collection.began = time.monotonic()


def _read(collection: _Collection, page: bytes, goes_on: bool) -> None:
    if not goes_on:
        collection.listing = ObjectList()
    collection.listing.add_page(page)
    if not collection.listing.continue_token:
        collection.on_list(collection.listing)
        collection.listing = ObjectList()


async def _reason(response: aiohttp.ClientResponse) -> str:
    return f"{response.status} {(await response.read()).decode(errors='replace')}"
