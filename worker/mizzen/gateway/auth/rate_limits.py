# SPDX-License-Identifier: Apache-2.0
"""Limits of API keys: token buckets for limits per minute, and slots for concurrent requests.

A gateway process holds a share of each limit. `LimitSharing` moves unused amounts between the processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from mizzen.gateway.auth.api_keys import Grant


class TokenBucket:
    """Token bucket with this process's share of a limit per minute.

    Its capacity and its refill per minute are the share of the limit. Its level may be negative if usage
    exceeds a reservation, and above its capacity if amounts were borrowed or refunded. An excess falls as
    fast as the buckets of the other processes refill, so that all levels together stay within the limit.
    """

    def __init__(
        self,
        per_minute: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        share: float = 1.0,
        full: bool = True,
    ) -> None:
        """Create a bucket; a minute's amount may be used at once if it is `full`.

        Args:
            per_minute: the limit of all processes together.
            clock: returns seconds of a monotonic clock.
            share: share of this process, above 0 and up to 1.
            full: whether the bucket is full at first, instead of empty.
        """
        self._clock = clock
        self.per_minute = per_minute
        self._share = share
        self._level = self._capacity if full else 0.0
        self._elsewhere = per_minute - self._capacity
        self._at = clock()

    @property
    def _capacity(self) -> float:
        return self.per_minute * self._share

    def _refill(self) -> None:
        now = self._clock()
        seconds, self._at = now - self._at, now
        capacity, rest = self._capacity, self.per_minute - self._capacity
        if self._level > capacity:
            self._level = max(capacity, self._level - seconds * rest / 60)
        else:
            self._level = min(capacity, self._level + seconds * capacity / 60)
        self._elsewhere = min(rest, self._elsewhere + seconds * rest / 60)

    @property
    def level(self) -> float:
        """Amount that this process may consume now; negative if more was used than the rate allows."""
        self._refill()
        return self._level

    @property
    def remaining(self) -> float:
        """Estimate of the amount that all processes together may consume now, from the last exchange."""
        self._refill()
        return self._level + self._elsewhere

    def consume(self, amount: float) -> float:
        """Consume an amount and return 0.0.

        If the bucket does not hold that much, consume nothing and return the seconds until the whole limit
        provides the missing amount.
        """
        missing = amount - self.level
        if missing > 0:
            return missing * 60 / self.per_minute
        self._level -= amount
        return 0.0

    def lend(self, amount: float) -> float:
        """Take up to `amount` out of the bucket for another process, and return how much that is."""
        lent = max(0.0, min(self.level, amount))
        self._level -= lent
        return lent

    def receive(self, amount: float, elsewhere: float) -> None:
        """Add an amount from other processes, which have `elsewhere` left."""
        self.refund(amount)
        self._elsewhere = max(0.0, min(elsewhere, self.per_minute - self._capacity))

    def refund(self, amount: float) -> None:
        """Give back an amount that was consumed in excess; a negative amount consumes more."""
        self._level = min(self.per_minute, self.level + amount)

    def set_rate(self, per_minute: int) -> None:
        """Change the limit; amounts that were consumed stay consumed."""
        used = self._capacity - self.level
        self.per_minute = per_minute
        self._level = self._capacity - used
        self._elsewhere = min(self._elsewhere, per_minute - self._capacity)

    def set_share(self, share: float) -> None:
        """Change the share of this process; what exceeds the new capacity is dropped."""
        self._refill()
        self._share = share
        self._level = min(self._level, self._capacity)
        self._elsewhere = self.per_minute - self._capacity

    @property
    def full_in_seconds(self) -> float:
        """Estimate of the seconds until the whole limit is available again."""
        return max(0.0, self.per_minute - self.remaining) * 60 / self.per_minute


class ParallelSlots:
    """This process's slots of a limit of concurrent requests.

    Processes lend slots to each other, and both sides keep account by the name of the other process. The
    slots of all processes together are the limit.
    """

    def __init__(self, limit: int, members: int = 1, rank: int = 0) -> None:
        """Create the slots of the process number `rank` of `members` processes."""
        self.limit = limit
        self._members, self._rank = members, rank
        self.borrowed: dict[str, int] = {}
        self._lent: dict[str, int] = {}

    @property
    def available(self) -> int:
        """Number of concurrent requests that this process may have."""
        own = self.limit // self._members + (self._rank < self.limit % self._members)
        return own + sum(self.borrowed.values()) - sum(self._lent.values())

    def set_limit(self, limit: int) -> None:
        """Change the limit of all processes together."""
        self.limit = limit

    def set_members(self, members: int, rank: int, others: Collection[str]) -> None:
        """Divide the limit again; slots lent to or borrowed from processes that are not in `others` end."""
        self._members, self._rank = members, rank
        self.borrowed = {name: count for name, count in self.borrowed.items() if name in others}
        self._lent = {name: count for name, count in self._lent.items() if name in others}

    def receive(self, lender: str, count: int) -> None:
        """Add slots that a process lent."""
        self.borrowed[lender] = self.borrowed.get(lender, 0) + count

    def give_back(self, running: int) -> list[str]:
        """Give back borrowed slots that the `running` requests do not need; return the lenders' names."""
        changed = []
        for name, count in self.borrowed.items():
            unused = min(count, self.available - running)
            if unused > 0:
                self.borrowed[name] = count - unused
                changed.append(name)
        return changed

    def lend(self, borrower: str, held: int, count: int, running: int) -> int:
        """Lend up to `count` slots that the `running` requests do not need, and return their number.

        Args:
            borrower: name of the process that asks.
            held: number of slots that the process already has from this one, according to itself.
            count: number of slots that it asks for.
            running: number of requests that run in this process.
        """
        self._lent[borrower] = held
        lent = max(0, min(count, self.available - running))
        self._lent[borrower] += lent
        return lent


def divide_limits(grant: Grant, parts: int) -> Grant:
    """Return a grant with each limit divided among `parts` gateway processes, rounded up.

    Every process enforces its part on its own, so together they allow at least the key's limits.
    """

    def part(limit: int | None) -> int | None:
        return None if limit is None else -(-limit // parts)

    return replace(
        grant,
        requests_per_minute=part(grant.requests_per_minute),
        tokens_per_minute=part(grant.tokens_per_minute),
        max_parallel=part(grant.max_parallel),
    )
