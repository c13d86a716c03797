"""A tenant: the holder of an API key, with the key's limits and their current usage."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from mizzen.gateway.auth.api_keys import MAX_PRIORITY, Grant
from mizzen.gateway.auth.rate_limits import TokenBucket
from mizzen.gateway.errors import ApiError


class Tenant:
    """Holder of one API key, with permissions, limits and current usage; kept when key files are reloaded."""

    def __init__(
        self, grant: Grant, clock: Callable[[], float] = time.monotonic, *, max_priority: int = 0
    ) -> None:
        self._clock = clock
        self._max_priority = max_priority
        """Highest priority that requests may have if the gateway has no keys."""
        self.running = 0
        self.tag = tenant_tag(grant.name)
        """Number that identifies the tenant to engines."""
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.set_grant(grant)

    def set_grant(self, grant: Grant) -> None:
        """Apply a changed grant of the same key; earlier requests and their tokens still count."""
        self.grant = grant
        self.requests = self._bucket(self.requests, grant.requests_per_minute)
        self.tokens = self._bucket(self.tokens, grant.tokens_per_minute)

    def _bucket(self, bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if per_minute is None:
            return None
        if bucket is None:
            return TokenBucket(per_minute, self._clock)
        bucket.set_rate(per_minute)
        return bucket

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

        If the gateway has no keys, a priority above the maximum is lowered to it.

        Raises:
            ApiError: 400 if `requested` is out of range, 403 if it is above the priority of the key.
        """
        if requested is None:
            return self.grant.priority
        if abs(requested) > MAX_PRIORITY:
            text = f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, not {requested}"
            raise ApiError(400, text, param="priority", code="invalid_value")
        if not self.name:
            return min(requested, self._max_priority)
        if requested > self.grant.priority:
            text = f"priority must be at most {self.grant.priority} with the key {self.name}, not {requested}"
            raise ApiError(403, text, param="priority", code="priority_not_allowed")
        return requested

    def begin_request(self) -> None:
        """Count a request as running, until `end_request`.

        Raises:
            ApiError: 429 if the tenant has reached its limit of parallel requests or of requests per minute.
        """
        limit = self.grant.max_parallel
        if limit is not None and self.running >= limit:
            text = f"the key {self.name} may have {limit} requests in progress at once"
            raise ApiError(429, text, code="too_many_parallel_requests", retry_after_seconds=1.0)
        wait = self.requests.consume(1) if self.requests else 0.0
        if wait and self.requests:
            text = f"the key {self.name} may send {self.requests.per_minute} requests a minute"
            raise ApiError(429, text, code="rate_limit_exceeded", retry_after_seconds=wait)
        self.running += 1

    def end_request(self) -> None:
        """Stop counting a request as running."""
        self.running -= 1

    def reserve(self, tokens: int) -> None:
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
        wait = self.tokens.consume(tokens)
        if wait:
            text = f"the key {self.name} may use {limit} tokens a minute; this request needs about {tokens}"
            raise ApiError(429, text, code="rate_limit_exceeded", retry_after_seconds=wait)

    def settle(self, reserved: int, used: int) -> None:
        """Charge the tokens that a request used, and give back the tokens that were reserved for it."""
        if self.tokens is not None:
            self.tokens.refund(reserved - used)

    def rate_limit_headers(self) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's x-ratelimit headers with their current values."""
        headers: list[tuple[bytes, bytes]] = []
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                values = {
                    "limit": str(bucket.per_minute),
                    "remaining": str(max(0, int(bucket.level))),
                    "reset": f"{bucket.full_in_seconds:.3f}s",
                }
                headers += [(f"x-ratelimit-{kind}-{name}".encode(), v.encode()) for kind, v in values.items()]
        return headers


def tenant_tag(name: str) -> int:
    """Return the number that identifies a tenant to engines: 63 bits of a hash of its name.

    The default tenant, which has no name, gets 0.
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1 if name else 0


def default_tenant(max_priority: int = 0) -> Tenant:
    """Return the tenant of a gateway without keys; its requests have at most priority `max_priority`."""
    return Tenant(Grant(name="", digest=b""), max_priority=max_priority)
