# SPDX-License-Identifier: Apache-2.0
"""A tenant: the holder of an API key, with the key's limits and their current usage."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection
from typing import Literal, Protocol

from mizzen.gateway.auth.api_keys import MAX_PRIORITY, Grant
from mizzen.gateway.auth.rate_limits import ParallelSlots, TokenBucket
from mizzen.gateway.errors import ApiError

LimitKind = Literal["requests", "tokens", "parallel"]


class Lender(Protocol):
    """Gets unused amounts of a key's limits from other gateway processes."""

    async def borrow(self, tenant: Tenant, kind: LimitKind) -> None:
        """Add what the tenant lacks for its pending requests to its share of a limit, as far as possible."""
        ...


class Tenant:
    """Holder of one API key, with permissions, limits and current usage; kept when key files are reloaded.

    The limits are those of all gateway processes together; this process has a share of them. If `lender` is
    set, it gets more from the others when the share does not suffice.
    """

    def __init__(self, grant: Grant, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.running = 0
        self.tag = tenant_tag(grant.name)
        """Number that identifies the tenant to engines."""
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.slots: ParallelSlots | None = None
        self.lender: Lender | None = None
        self._pending: dict[LimitKind, float] = {"requests": 0, "tokens": 0, "parallel": 0}
        """Amounts that requests need while they wait for `lender`."""
        self._members, self._rank = 1, 0
        self.set_grant(grant)

    def set_grant(self, grant: Grant) -> None:
        """Apply a changed grant of the same key; earlier requests and their tokens still count."""
        self.grant = grant
        self.requests = self._bucket(self.requests, grant.requests_per_minute)
        self.tokens = self._bucket(self.tokens, grant.tokens_per_minute)
        if grant.max_parallel is None:
            self.slots = None
        elif self.slots is None:
            self.slots = ParallelSlots(grant.max_parallel, self._members, self._rank)
        else:
            self.slots.set_limit(grant.max_parallel)

    def _bucket(self, bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if per_minute is None:
            return None
        if bucket is None:
            return TokenBucket(per_minute, self._clock, share=1 / self._members)
        bucket.set_rate(per_minute)
        return bucket

    def _bucket_of(self, kind: LimitKind) -> TokenBucket | None:
        """Return the bucket of a limit; None without this limit, and for concurrent requests."""
        return {"requests": self.requests, "tokens": self.tokens}.get(kind)

    # ── shares of the limits ──────────────────────────────────────────────────────────────────────────────

    def set_members(self, members: int, rank: int, others: Collection[str]) -> None:
        """Take the share of process number `rank` of `members`; `others` are the names of the others."""
        self._members, self._rank = members, rank
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.set_share(1 / members)
        if self.slots is not None:
            self.slots.set_members(members, rank, others)

    def empty_buckets(self) -> None:
        """Empty the buckets, because other processes hold the whole limits; they can lend some of it."""
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.lend(bucket.per_minute)

    def missing(self, kind: LimitKind) -> float:
        """Return the amount that pending requests lack in this process; not above 0 if nothing is missing."""
        pending = self._pending[kind]
        if kind == "parallel":
            return self.running + pending - self.slots.available if self.slots is not None else 0.0
        bucket = self._bucket_of(kind)
        return pending - bucket.level if bucket is not None else 0.0

    async def _borrow(self, kind: LimitKind, amount: float) -> None:
        """Let `lender` get an amount that this process lacks."""
        if self.lender is not None:
            self._pending[kind] += amount
            try:
                await self.lender.borrow(self, kind)
            finally:
                self._pending[kind] -= amount

    def amount_ahead(self, kind: LimitKind, seconds: float) -> float:
        """Return the amount that a limit provides in a time; 0 for concurrent requests."""
        bucket = self._bucket_of(kind)
        return bucket.per_minute * seconds / 60 if bucket is not None else 0.0

    def receive(self, kind: LimitKind, lender: str, amount: float, elsewhere: float) -> None:
        """Add an amount that another process lent; the asked processes have `elsewhere` left."""
        bucket = self._bucket_of(kind)
        if bucket is not None:
            bucket.receive(max(0.0, amount), elsewhere)
        elif kind == "parallel" and self.slots is not None and amount > 0:
            self.slots.receive(lender, int(amount))

    def lend(self, kind: LimitKind, borrower: str, held: int, amount: float) -> tuple[float, float]:
        """Lend an amount to another process; return how much, and how much is left in this one."""
        if kind == "parallel":
            if self.slots is None:
                return 0.0, 0.0
            lent = self.slots.lend(borrower, held, int(amount), self.running)
            return float(lent), float(max(0, self.slots.available - self.running))
        bucket = self._bucket_of(kind)
        return (bucket.lend(amount), max(0.0, bucket.level)) if bucket is not None else (0.0, 0.0)

    def borrowed_slots(self, lender: str) -> int:
        """Return the number of slots for concurrent requests that another process has lent."""
        return self.slots.borrowed.get(lender, 0) if self.slots is not None else 0

    def give_back_slots(self) -> list[str]:
        """Give back borrowed slots that no request needs; return the names of their lenders."""
        return self.slots.give_back(self.running) if self.slots is not None else []

    # ── permissions ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def name(self) -> str:
        """Name of the tenant's key; empty for the default tenant."""
        return self.grant.name

    @property
    def weight(self) -> float:
        """Weight in the queue, relative to other tenants."""
        return self.grant.weight

    @property
    def rate_limited(self) -> bool:
        """True if the key has rate limits, which responses report."""
        return self.requests is not None or self.tokens is not None

    def may_use(self, model: str) -> bool:
        """Return whether the tenant may use a model name."""
        return not self.grant.models or model in self.grant.models

    def check_model(self, model: str) -> None:
        """Check that the tenant may use a model name.

        Raises:
            ApiError: 403 if the tenant may not use it.
        """
        if not self.may_use(model):
            raise ApiError(
                403,
                f"the key {self.name} may not use the model {model[:200]!r}",
                param="model",
                code="model_not_allowed",
            )

    def priority(self, requested: int | None) -> int:
        """Return the priority of a request; `requested` is the priority in its body, or None.

        If the gateway has no keys, the request's priority is ignored.

        Raises:
            ApiError: 400 if `requested` is out of range, 403 if it is above the priority of the key.
        """
        if requested is None or not self.name:
            return self.grant.priority
        if abs(requested) > MAX_PRIORITY:
            text = f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, not {requested}"
            raise ApiError(400, text, param="priority", code="invalid_value")
        if requested > self.grant.priority:
            text = f"priority must be at most {self.grant.priority} with the key {self.name}, not {requested}"
            raise ApiError(403, text, param="priority", code="priority_not_allowed")
        return requested

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────

    async def begin_request(self) -> None:
        """Count a request as running, until `end_request`.

        Raises:
            ApiError: 429 if the tenant has reached its limit of parallel requests or of requests per minute.
        """
        await self._claim_slot()
        try:
            await self._consume("requests", 1)
        except BaseException:
            self.running -= 1
            raise

    async def _claim_slot(self) -> None:
        if self.slots is not None and self.running >= self.slots.available:
            await self._borrow("parallel", 1)
        if self.slots is not None and self.running >= self.slots.available:
            text = f"the key {self.name} may have {self.slots.limit} requests in progress at once"
            raise ApiError(429, text, code="too_many_parallel_requests", retry_after_seconds=1.0)
        self.running += 1

    async def _consume(self, kind: LimitKind, amount: float) -> None:
        """Consume an amount; other processes may lend a part.

        Raises:
            ApiError: 429 if it is not available.
        """
        bucket = self._bucket_of(kind)
        if bucket is None or not bucket.consume(amount):
            return
        await self._borrow(kind, amount)
        wait = bucket.consume(amount)
        if not wait:
            return
        text = f"the key {self.name} may send {bucket.per_minute} requests a minute"
        if kind == "tokens":
            text = f"the key {self.name} may use {bucket.per_minute} tokens a minute"
            text = f"{text}; this request needs about {amount}"
        raise ApiError(429, text, code="rate_limit_exceeded", retry_after_seconds=wait)

    def end_request(self) -> None:
        """Stop counting a request as running."""
        self.running -= 1

    async def reserve(self, tokens: int) -> None:
        """Reserve the tokens that a request is expected to use; `settle` corrects the amount.

        Raises:
            ApiError: 429 if fewer than `tokens` are left now, or if `tokens` exceeds the limit per minute.
        """
        if self.tokens is None:
            return
        limit = self.tokens.per_minute
        if tokens > limit:
            text = f"the request needs about {tokens} tokens; the key {self.name} may use {limit} a minute"
            raise ApiError(429, f"{text}: shorten it or lower max_tokens", code="request_too_large")
        await self._consume("tokens", tokens)

    def settle(self, reserved: int, used: int) -> None:
        """Charge the tokens that a request used, and refund the tokens that were reserved for it."""
        if self.tokens is not None:
            self.tokens.refund(reserved - used)

    def rate_limit_headers(self) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's x-ratelimit headers with their current values."""
        headers: list[tuple[bytes, bytes]] = []
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                values = {
                    "limit": str(bucket.per_minute),
                    "remaining": str(max(0, int(bucket.remaining))),
                    "reset": f"{bucket.full_in_seconds:.3f}s",
                }
                headers += [(f"x-ratelimit-{kind}-{name}".encode(), v.encode()) for kind, v in values.items()]
        return headers


def tenant_tag(name: str) -> int:
    """Return the number that identifies a tenant to engines: 63 bits of a hash of its name.

    The default tenant, which has no name, gets 0.
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1 if name else 0


def default_tenant() -> Tenant:
    """Return the tenant of a gateway without keys; all its requests have the priority 0."""
    return Tenant(Grant(name="", digest=b""))
