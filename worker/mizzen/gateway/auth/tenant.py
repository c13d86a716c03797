"""A tenant: the holder of a key, with what it has used."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from mizzen.gateway.auth.api_keys import MAX_PRIORITY, Grant
from mizzen.gateway.auth.rate_limits import TokenBucket
from mizzen.gateway.errors import ApiError


class Tenant:
    """What one key's holder may do, and what it does now. It outlives a reload of the keys."""

    def __init__(
        self, grant: Grant, clock: Callable[[], float] = time.monotonic, *, max_priority: int = 0
    ) -> None:
        self._clock = clock
        self._max_priority = max_priority
        """Of everyone, where there are no keys."""
        self.running = 0
        self.tag = tenant_tag(grant.name)
        """What engines know it by."""
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.set_grant(grant)

    def set_grant(self, grant: Grant) -> None:
        """Take a newer grant of the same name; what was used stays used."""
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
        """The key's name; empty for everyone, when there are no keys."""
        return self.grant.name

    @property
    def weight(self) -> float:
        """Its share beside other tenants."""
        return self.grant.weight

    @property
    def rate_limited(self) -> bool:
        """Whether it has rates, which answers tell of."""
        return self.requests is not None or self.tokens is not None

    def may_use(self, model: str) -> bool:
        """Whether a model's name is among those of its key."""
        return not self.grant.models or model in self.grant.models

    def check_model(self, model: str) -> None:
        """Raise unless it may use a model.

        Raises:
            ApiError: 403.
        """
        if not self.may_use(model):
            raise ApiError(
                403,
                f"the key {self.name} may not use the model {model[:200]!r}",
                param="model",
                code="model_not_allowed",
            )

    def priority(self, asked: int | None) -> int:
        """Return the priority of a request that asks for one, or for none.

        Without keys, one that is too high is taken for the highest.

        Raises:
            ApiError: 400 for one out of range, 403 for one above the key's.
        """
        if asked is None:
            return self.grant.priority
        if abs(asked) > MAX_PRIORITY:
            text = f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, not {asked}"
            raise ApiError(400, text, param="priority", code="invalid_value")
        if not self.name:
            return min(asked, self._max_priority)
        if asked > self.grant.priority:
            text = f"priority must be at most {self.grant.priority} with the key {self.name}, not {asked}"
            raise ApiError(403, text, param="priority", code="priority_not_allowed")
        return asked

    def begin_request(self) -> None:
        """Count one request as running, until `end`.

        Raises:
            ApiError: 429 when it is one too many, at once or within a minute.
        """
        most = self.grant.max_parallel
        if most is not None and self.running >= most:
            text = f"the key {self.name} may have {most} requests in work at once"
            raise ApiError(429, text, code="too_many_parallel_requests", retry_after_seconds=1.0)
        wait = self.requests.take(1) if self.requests else 0.0
        if wait and self.requests:
            text = f"the key {self.name} may send {self.requests.per_minute} requests a minute"
            raise ApiError(429, text, code="rate_limit_exceeded", retry_after_seconds=wait)
        self.running += 1

    def end_request(self) -> None:
        """End the count of a request."""
        self.running -= 1

    def reserve(self, tokens: int) -> None:
        """Take the tokens that a request is expected to use; `settle` corrects that.

        Raises:
            ApiError: 429 when they are too many now, or ever.
        """
        if self.tokens is None:
            return
        most = self.tokens.per_minute
        if tokens > most:
            text = f"the request needs about {tokens} tokens; the key {self.name} may use {most} a minute"
            raise ApiError(429, f"{text}: ask for less, such as a lower max_tokens", code="request_too_large")
        wait = self.tokens.take(tokens)
        if wait:
            text = f"the key {self.name} may use {most} tokens a minute; this request needs about {tokens}"
            raise ApiError(429, text, code="rate_limit_exceeded", retry_after_seconds=wait)

    def settle(self, reserved: int, used: int) -> None:
        """Charge what a request has used instead of what was reserved for it."""
        if self.tokens is not None:
            self.tokens.refund(reserved - used)

    def rate_limit_headers(self) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's x-ratelimit headers as of now."""
        found: list[tuple[bytes, bytes]] = []
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                values = {
                    "limit": str(bucket.per_minute),
                    "remaining": str(max(0, int(bucket.level))),
                    "reset": f"{bucket.full_in_seconds:.3f}s",
                }
                found += [(f"x-ratelimit-{kind}-{name}".encode(), v.encode()) for kind, v in values.items()]
        return found


def tenant_tag(name: str) -> int:
    """Return a key's name as engines get it: 63 bits, the same from every gateway; 0 without keys."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1 if name else 0


def default_tenant(max_priority: int = 0) -> Tenant:
    """Return the tenant of a gateway without keys, whose requests get at most such a priority."""
    return Tenant(Grant(name="", digest=b""), max_priority=max_priority)
