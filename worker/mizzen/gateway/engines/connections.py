# SPDX-License-Identifier: Apache-2.0
"""Connections to one engine: the current connection, and further ones during a key rotation.

Newer keys are tried on a second connection. Once the engine accepts them, new requests use that connection,
and the old connection closes after its last request, so no request fails because of a rotation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mizzen.wire.client.engine_client import EngineLink
from mizzen.wire.client.key_offers import KeyOffer

OfferSource = Callable[[], Sequence[KeyOffer]]
MakeLink = Callable[[OfferSource, Callable[[EngineLink], None]], EngineLink]


class EngineConnections:
    """All connections (links) to one engine. Not thread-safe."""

    def __init__(
        self, make_link: MakeLink, offers: OfferSource, on_change: Callable[[EngineLink], None]
    ) -> None:
        """Connect to the engine.

        Args:
            make_link: creates a link. Its arguments are a function like `offers`, and a callback to which the
                link passes itself when its state changes.
            offers: returns the current key offers (endpoints and keys to try), best first; at least one.
            on_change: called with a link whose state has changed, and with a link that becomes current.
        """
        self._make_link = make_link
        self._offers = offers
        self._on_change = on_change
        self._tasks: dict[EngineLink, asyncio.Task[None]] = {}
        self._next: EngineLink | None = None
        self.current = self._start(offers)

    @property
    def key_names(self) -> list[str]:
        """Sorted names of the keys that established connections use."""
        return sorted({link.offer.name for link in self._tasks if link.welcome is not None} - {""})

    def refresh(self) -> None:
        """Try key offers that are better than the current link's, and close former links that are idle."""
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
        """Close all links; their streams fail."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _better_offers(self) -> Sequence[KeyOffer]:
        """Return the key offers that are better than the current link's, best first.

        If no offer is better, return only the best offer. If the current link's offer has been withdrawn,
        return all offers.
        """
        offers = list(self._offers())
        current_offer = self.current.offer
        return offers[: offers.index(current_offer)] or offers[:1] if current_offer in offers else offers

    def _start(self, offers: OfferSource) -> EngineLink:
        link = self._make_link(offers, self._changed)
        self._tasks[link] = asyncio.get_running_loop().create_task(link.run())
        self._tasks[link].add_done_callback(lambda task: self._tasks.pop(link, None))
        return link

    def _end(self, link: EngineLink) -> None:
        self._tasks[link].cancel()

    def _changed(self, link: EngineLink) -> None:
        if link is self._next and link.welcome is not None:
            self.current, self._next = link, None
        self._on_change(link)
