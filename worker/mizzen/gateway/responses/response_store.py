# SPDX-License-Identifier: Apache-2.0
"""Store of recent responses by id, in the memory of one gateway process.

It serves `previous_response_id` and `item_reference` in requests, and `GET` and `DELETE` of a response. Only
the owner of a response, an API key, can find it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

RESPONSE_OVERHEAD = 2048
"""Approximate memory in bytes of a stored response besides its JSON text: objects and index entries."""
EXPIRY_CHECK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of the store."""

    seconds: float
    """Time after its last use at which a response is removed."""
    responses: int
    """Maximum number of responses."""
    bytes: int
    """Maximum size of all responses with their conversations."""


@dataclass(slots=True, eq=False)
class Turn:
    """The input items of one request and the output items of its response, after an earlier turn.

    Later responses of a conversation share their earlier turns.
    """

    items: bytes
    """JSON of the items, separated by commas; it may be empty."""
    count: int
    """Number of items."""
    earlier: Turn | None
    """Turn that precedes this one, if any."""
    users: int = 0
    """Number of stored responses and turns that refer to this turn."""

    def conversation(self) -> list[Turn]:
        """Return the turns of the conversation up to this one, in order."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.earlier
        return turns[::-1]


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A complete response with the turn that it ends."""

    id: str
    body: bytes
    """JSON of the response."""
    turn: Turn
    output: Mapping[str, bytes]
    """JSON of each output item, by its id."""
    expires: float = 0.0
    """Time on the store's clock after which the response is removed."""

    @property
    def size(self) -> int:
        """Size in bytes, without the turn."""
        return RESPONSE_OVERHEAD + len(self.body) + sum(map(len, self.output.values()))


class OwnedResponses:
    """Responses of one owner, in the order of their last use."""

    def __init__(self) -> None:
        self.responses: dict[str, StoredResponse] = {}
        self.items: dict[str, StoredResponse] = {}
        """Response of each output item, by the item's id."""
        self.bytes = 0


class ResponseStore:
    """Bounded store of responses; it is used on the event loop only.

    With API keys, one key may fill at most half of the store. If the store is full, the least recently used
    response of the owner with the largest share is removed.
    """

    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._owners: dict[str, OwnedResponses] = {}
        self.count = 0
        """Number of responses."""
        self.bytes = 0
        """Size of all responses with their conversations."""

    def add(self, owner: str, response: StoredResponse) -> None:
        """Store a response of `owner` ("" if there are no API keys); remove others to make room."""
        owned = self._owners.setdefault(owner, OwnedResponses())
        response.expires = self._clock() + self.limits.seconds
        owned.responses[response.id] = response
        owned.items.update(dict.fromkeys(response.output, response))
        self.count += 1
        self._count_bytes(owned, response.size + retain_turn(response.turn))
        self.remove_expired()
        while owner in self._owners and self._share(owned) > (0.5 if owner else 1.0):
            self._remove_oldest(owner)
        while self.count > self.limits.responses or self.bytes > self.limits.bytes:
            self._remove_oldest(max(self._owners, key=lambda name: self._share(self._owners[name])))

    def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return the response of `owner` with this id, and extend its time; None if it is not stored."""
        owned = self._owners.get(owner)
        return None if owned is None else self._use(owned, owned.responses.get(response_id))

    def find_item(self, owner: str, item_id: str) -> bytes | None:
        """Return the JSON of an output item of `owner`, and extend the time of its response.

        Return None if the item is not stored.
        """
        owned = self._owners.get(owner)
        found = None if owned is None else self._use(owned, owned.items.get(item_id))
        return None if found is None else found.output[item_id]

    def remove(self, owner: str, response_id: str) -> bool:
        """Remove a response of `owner`; return whether it was stored. Later responses keep their turns."""
        if self.find(owner, response_id) is None:
            return False
        self._remove(owner, response_id)
        return True

    def remove_expired(self) -> None:
        """Remove all responses whose time has ended."""
        now = self._clock()
        for owner, owned in tuple(self._owners.items()):
            while owned.responses and next(iter(owned.responses.values())).expires <= now:
                self._remove_oldest(owner)

    async def watch(self) -> None:
        """Remove expired responses until cancelled."""
        while True:
            await asyncio.sleep(min(EXPIRY_CHECK_SECONDS, self.limits.seconds))
            self.remove_expired()

    def _use(self, owned: OwnedResponses, response: StoredResponse | None) -> StoredResponse | None:
        now = self._clock()
        if response is None or response.expires <= now:
            return None
        response.expires = now + self.limits.seconds
        owned.responses[response.id] = owned.responses.pop(response.id)
        return response

    def _share(self, owned: OwnedResponses) -> float:
        """Return the share of the store that an owner fills."""
        return max(owned.bytes / self.limits.bytes, len(owned.responses) / self.limits.responses)

    def _remove_oldest(self, owner: str) -> None:
        self._remove(owner, next(iter(self._owners[owner].responses)))

    def _remove(self, owner: str, response_id: str) -> None:
        owned = self._owners[owner]
        response = owned.responses.pop(response_id)
        for item_id in response.output:
            del owned.items[item_id]
        self.count -= 1
        self._count_bytes(owned, -response.size - release_turn(response.turn))
        if not owned.responses:
            del self._owners[owner]

    def _count_bytes(self, owned: OwnedResponses, size: int) -> None:
        owned.bytes += size
        self.bytes += size


def retain_turn(turn: Turn) -> int:
    """Count one more user of a turn; return the size of the turns that had no user before, in bytes."""
    size = 0
    for each in chain_of(turn):
        each.users += 1
        if each.users > 1:
            break
        size += len(each.items)
    return size


def release_turn(turn: Turn) -> int:
    """Count one user less of a turn; return the size of the turns that have no user any more, in bytes."""
    size = 0
    for each in chain_of(turn):
        each.users -= 1
        if each.users:
            break
        size += len(each.items)
    return size


def chain_of(turn: Turn | None) -> Iterator[Turn]:
    """Yield a turn and those before it, from the last to the first."""
    while turn is not None:
        yield turn
        turn = turn.earlier
