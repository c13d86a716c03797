"""The connections to one engine: the one that gets requests, and those that keys come and go with.

Newer keys are tried beside the connection that is there. Once the engine welcomes them, new requests go that
way, and the former connection ends with its last request: a change of keys costs none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mizzen.wire.client.engine_client import EngineLink
from mizzen.wire.client.key_offers import KeyOffer

OfferSource = Callable[[], Sequence[KeyOffer]]
MakeLink = Callable[[OfferSource, Callable[[EngineLink], None]], EngineLink]


class EngineConnections:
    """All on one event loop."""

    def __init__(self, make: MakeLink, offers: OfferSource, on_change: Callable[[EngineLink], None]) -> None:
        """Connect.

        Args:
            make: returns a connection that tries ways, and calls back with itself when it changes.
            offers: the ways to connect as they are now, the best first; at least one.
            on_change: called when a connection has changed, and when another one gets the requests.
        """
        self._make = make
        self._offers = offers
        self._on_change = on_change
        self._tasks: dict[EngineLink, asyncio.Task[None]] = {}
        self._next: EngineLink | None = None
        self.current = self._start(offers)

    @property
    def key_names(self) -> list[str]:
        """Names of the keys that connections use."""
        return sorted({link.offer.name for link in self._tasks if link.welcome is not None} - {""})

    def refresh(self) -> None:
        """Try newer keys, where there are some, and end what has no requests any more."""
        for link in tuple(self._tasks):
            if link not in (self.current, self._next) and not link.open_streams:
                self._end(link)
        best = self._offers()[0]
        if self.current.welcome is None or self.current.offer == best:
            if self._next is not None:
                self._end(self._next)
                self._next = None
        elif self._next is None:
            self._next = self._start(self._better_offers)

    async def close(self) -> None:
        """End all connections; their streams fail."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _better_offers(self) -> Sequence[KeyOffer]:
        """The ways that are better than the present connection's."""
        ways = list(self._offers())
        there = self.current.offer
        return ways[: ways.index(there)] or ways[:1] if there in ways else ways

    def _start(self, ways: OfferSource) -> EngineLink:
        link = self._make(ways, self._changed)
        self._tasks[link] = asyncio.get_running_loop().create_task(link.run())
        self._tasks[link].add_done_callback(lambda task: self._tasks.pop(link, None))
        return link

    def _end(self, link: EngineLink) -> None:
        self._tasks[link].cancel()

    def _changed(self, link: EngineLink) -> None:
        if link is self._next and link.welcome is not None:
            self.current, self._next = link, None
        self._on_change(link)
