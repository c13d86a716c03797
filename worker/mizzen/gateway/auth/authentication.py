# SPDX-License-Identifier: Apache-2.0
"""Authenticates requests by API key and limits their rate and parallelism, before their bodies are read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mizzen.gateway.auth.api_keys import (
    ApiKeyIndex,
    Grant,
    InvalidKeyFile,
    parse_key_files,
    read_key_files,
)
from mizzen.gateway.auth.limit_sharing import LimitSharing
from mizzen.gateway.auth.rate_limits import divide_limits
from mizzen.gateway.auth.tenant import Tenant, default_tenant
from mizzen.gateway.error_shapes import shape_error
from mizzen.gateway.errors import ApiError
from mizzen.gateway.telemetry.request_record import get_record

log = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0
"""Interval at which key files are checked for changes."""
TENANT_KEY = "mizzen.tenant"
"""Key of a request's tenant in its ASGI scope."""
SLOT_KEY = "mizzen.slot"
"""Key of a request's `ParallelSlot` in its ASGI scope."""
MAX_KEY_BYTES = 4096


class TenantRegistry:
    """All tenants, one for each API key in force.

    Without key files, all requests belong to one default tenant, which has no limits.
    """

    def __init__(
        self,
        paths: Sequence[str],
        reload_seconds: float = RELOAD_SECONDS,
        divided_by: int = 1,
    ) -> None:
        """Read the key files.

        Args:
            paths: key files, or folders with key files; empty if requests need no key.
            reload_seconds: interval at which the files are checked for changes.
            divided_by: number of gateway processes that share each key's limits without an exchange.

        Raises:
            InvalidKeyFile: a file is missing or malformed.
        """
        self._paths = tuple(paths)
        self._seconds = reload_seconds
        self._divided_by = divided_by
        self._files: dict[Path, bytes] = {}
        self._key_index: ApiKeyIndex | None = None
        self._tenants: dict[str, Tenant] = {}
        self._default_tenant = default_tenant()
        self._problem = ""
        self.sharing = LimitSharing(lambda: self._tenants.values(), self.get)
        """Shares of the limits that this process has, unless `divided_by` is above 1."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when new keys come into force, and when `problem` changes."""
        if self._paths:
            files = read_key_files(self._paths)
            self._use(files, parse_key_files(files))
        else:
            log.warning("no API keys are configured (--api-keys-file): the gateway serves every client")

    @property
    def keyless(self) -> bool:
        """True if requests need no key."""
        return self._key_index is None

    @property
    def key_count(self) -> int:
        """Number of keys in force."""
        return len(self._tenants)

    @property
    def problem(self) -> str:
        """Reason why the current files are not in force; empty if they are. It never contains a key."""
        return self._problem

    def get(self, name: str) -> Tenant | None:
        """Return the tenant whose key is called `name`, or None."""
        return self._tenants.get(name)

    async def watch(self) -> None:
        """Reload changed key files until cancelled; if they are invalid, the previous keys stay in force."""
        while self._paths:
            await asyncio.sleep(self._seconds)
            try:
                files = await asyncio.to_thread(read_key_files, self._paths)
                if files != self._files:
                    self._use(files, await asyncio.to_thread(parse_key_files, files))
                problem = ""
            except InvalidKeyFile as error:
                if str(error) != self._problem:  # logged once, not every second
                    fields = {"reason": str(error), "in_force": "the keys that were read before"}
                    log.error("cannot read API keys", extra={"fields": fields})
                problem = str(error)
            changed, self._problem = problem != self._problem, problem
            if changed:
                self.on_change()

    def _use(self, files: dict[Path, bytes], grants: tuple[Grant, ...]) -> None:
        tenants: dict[str, Tenant] = {}
        for grant in (divide_limits(undivided, self._divided_by) for undivided in grants):
            tenant = self._tenants.get(grant.name)
            if tenant is None:
                tenant = Tenant(grant)
                self.sharing.divide(tenant)
            else:
                tenant.set_grant(grant)
            tenants[grant.name] = tenant
        self._files, self._tenants, self._key_index, self._problem = files, tenants, ApiKeyIndex(grants), ""
        log.info("API keys are in force", extra={"fields": {"keys": len(grants)}})
        self.on_change()

    def authenticate(self, scope: Scope) -> Tenant:
        """Return the tenant of a request.

        Raises:
            ApiError: 401 if a key is required and the request has none, or has an unknown key.
        """
        if self._key_index is None:
            return self._default_tenant
        key = request_key(dict(scope["headers"]))
        if not key:
            text = "this gateway needs an API key: send it as Authorization: Bearer <key>, or as x-api-key"
            raise ApiError(401, text, code="missing_api_key")
        grant = self._key_index.find_grant(key) if len(key) <= MAX_KEY_BYTES else None
        if grant is None:
            text = "this gateway does not know the API key: check it, or ask for another one"
            raise ApiError(401, text, code="invalid_api_key")
        return self._tenants[grant.name]


def request_key(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the API key in a request's headers; empty if they have no key.

    A bearer token in `authorization` takes precedence over `x-api-key`, the header of Anthropic's clients.
    """
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    bearer = key.strip() if scheme.lower() == b"bearer" else b""
    return bearer or headers.get(b"x-api-key", b"").strip()


def get_tenant(scope: Scope) -> Tenant | None:
    """Return the tenant of a request; None if the request did not pass `AuthMiddleware`."""
    return scope.get(TENANT_KEY)


def get_tenant_name(scope: Scope) -> str:
    """Return the name of a request's API key; empty if the request did not pass `AuthMiddleware`."""
    tenant = get_tenant(scope)
    return "" if tenant is None else tenant.name


class ParallelSlot:
    """Slot for one of the requests that a tenant may have in progress at once."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant: Tenant | None = tenant

    @classmethod
    async def claim(cls, tenant: Tenant) -> ParallelSlot:
        """Count a request of the tenant as running, and return its slot.

        Raises:
            ApiError: 429 if the tenant has reached its limit of parallel requests or of requests per minute.
        """
        await tenant.begin_request()
        return cls(tenant)

    def release(self) -> None:
        """Release the slot, unless it was released already."""
        if self._tenant is not None:
            self._tenant.end_request()
            self._tenant = None


def release_parallel_slot(scope: Scope) -> None:
    """Release a request's parallel slot, if any, even if the client has not read the whole response."""
    if SLOT_KEY in scope:
        scope[SLOT_KEY].release()


class AuthMiddleware:
    """Middleware that admits a request if it has a valid key and the key's limits allow it.

    Response headers report the remaining limits. GET requests for a path in `public_paths` need no key.
    """

    def __init__(
        self, app: ASGIApp, tenants: TenantRegistry, public_paths: frozenset[str] = frozenset()
    ) -> None:
        self._app = app
        self._tenants = tenants
        self._public_paths = public_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its tenant in the scope, or reject it.

        Requests without a valid key get 401; POST requests beyond a limit of the tenant get 429.
        """
        if scope["type"] != "http" or self._is_public(scope):
            await self._app(scope, receive, send)
            return
        try:
            tenant = self._tenants.authenticate(scope)
        except ApiError as error:
            get_record(scope).error = error.code or error.error_type
            await send_error(scope, send, error, [(b"www-authenticate", b"Bearer")])
            return
        scope[TENANT_KEY] = tenant
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *tenant.rate_limit_headers()]
            await send(message)

        try:
            slot = scope[SLOT_KEY] = await ParallelSlot.claim(tenant)
        except ApiError as error:
            get_record(scope).error = error.code or error.error_type
            await send_error(scope, send, error, tenant.rate_limit_headers())
            return
        try:
            await self._app(scope, receive, sending if tenant.rate_limited else send)
        finally:
            slot.release()

    def _is_public(self, scope: Scope) -> bool:
        return scope["method"] in ("GET", "HEAD") and scope["path"] in self._public_paths


async def send_error(
    scope: Scope, send: Send, error: ApiError, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """Send an error in the shape of the API that the request uses."""
    status, body = shape_error(error, scope)
    length = (b"content-length", str(len(body)).encode())
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*error.headers(), *headers, length],
        }
    )
    await send({"type": "http.response.body", "body": body})
