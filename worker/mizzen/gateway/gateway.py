"""One gateway: everything that its two servers share."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from starlette.types import Scope

from mizzen.gateway.admission.admission import Admission, Ticket
from mizzen.gateway.admission.new_entry import new_ticket
from mizzen.gateway.auth.authentication import Tenants, tenant_of
from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.engines.discovery import discovery
from mizzen.gateway.engines.engine_table import Engine, EngineTable
from mizzen.gateway.engines.failure_limits import publish
from mizzen.gateway.http.malloc_trim import Trimmer
from mizzen.gateway.http.request_bodies import BodyBudget
from mizzen.gateway.requests.backpressure import Untaken
from mizzen.gateway.requests.body_reader import BodyReader
from mizzen.gateway.requests.generation_request import Wish
from mizzen.gateway.routing.dispatcher import Dispatcher
from mizzen.gateway.services import Service, ServiceEntry, Services, not_found
from mizzen.gateway.telemetry.access_log import AccessLog
from mizzen.gateway.telemetry.metrics import Metrics
from mizzen.gateway.telemetry.table_watch import News
from mizzen.gateway.telemetry.tracing import start_tracing
from mizzen.wire.curve_keys import NEXT, KeyFolder, KeyRing

KEYS_SECONDS = 1.0
"""How often the gateway's own keys and tokens are looked at for changes."""
STATES = ("connecting", "verifying", "warming", "serving", "suspect", "draining", "broken")


class Gateway:
    """State of a gateway process. `start` and `close` run on its event loop."""

    def __init__(self, config: GatewayConfig) -> None:
        """Read keys and token.

        Raises:
            ValueError: a file of keys or the token file cannot be read, or tracing lacks its packages.
        """
        self.config = config
        self.metrics = Metrics(lambda: self.models)
        self.access_log = AccessLog(config.access_log == "prompts") if config.access_log != "off" else None
        self.tracing = start_tracing(config.otlp_endpoint, config.service or config.served_name)
        self.draining = False
        self.news = News()
        self.tenants = Tenants(
            config.api_keys_file,
            max_priority=config.keyless_max_priority,
            divided_by=config.key_limits_divided_by,
        )
        self.tenants.on_change = self.news.tell
        self.trimmer = Trimmer()
        self.bodies = BodyBudget(config.max_bodies_bytes, config.max_body_bytes, self.trimmer.freed)
        self.reader = BodyReader()
        self.untaken = Untaken()
        self.services = Services(self._new_service, config.drain_timeout_seconds, lambda: self.ring)
        self._tokens = read_tokens(config.admin_token_file)
        self._name = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._keys = read_keys(config)
        self._discovery: asyncio.Task[None] | None = None
        self._reloads: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to discover engines.

        Raises:
            ValueError: an endpoint is malformed or needs keys, or there is no Kubernetes configuration.
        """
        find = discovery(self.config, self._keys, self.services, self.metrics)
        self._discovery = asyncio.create_task(find, name="discovery")
        self._reloads = [
            asyncio.create_task(self.tenants.watch(), name="API keys"),
            asyncio.create_task(self._follow_keys(), name="keys"),
        ]

    async def close(self, reason: str = "the gateway is shutting down") -> None:
        """Refuse who waits, and close the connections: what still runs ends with an error."""
        self.news.close()
        if self._discovery is None:
            return
        tasks = [self._discovery, *self._reloads]
        self._discovery, self._reloads = None, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.services.close(reason)
        self.reader.close()
        self.trimmer.close()

    async def flush(self) -> None:
        """Have the access log and traces written; requests that `close` ended come after it."""
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        if self.access_log is not None:
            await asyncio.to_thread(self.access_log.close)

    @property
    def ring(self) -> KeyRing | None:
        """The gateway's own keys as they are now."""
        return self._keys.ring if self._keys is not None else None

    async def _follow_keys(self) -> None:
        """Take changes of the files with keys and tokens until cancelled."""
        while True:
            await asyncio.sleep(KEYS_SECONDS)
            with contextlib.suppress(ValueError):  # a file that cannot be read changes nothing
                self._tokens = read_tokens(self.config.admin_token_file)
            if self._keys is not None and self._keys.look():
                self.services.follow_keys()
                self.news.tell()

    @property
    def ready(self) -> str:
        """Why this gateway should get no traffic; empty when it should."""
        if self.draining:
            return "draining"
        if self._discovery is None or self._discovery.done():
            return "discovery does not run"
        if not self.services.listed:
            return "the services are not known yet"
        return "" if self.services.synced else "the engines are not known yet"

    # ── what a request asks ───────────────────────────────────────────────────────────────────────────────

    def service_named(self, model: str, scope: Scope) -> Service:
        """Return the service that has a model, for a request of a tenant that may use it.

        Raises:
            ApiError: 404 when there is none, 403 when it is not the tenant's.
        """
        service, tenant = self.services.find(model), tenant_of(scope)
        if service is None:
            raise not_found(model, (name for name, _ in self.services.models(tenant)))
        if tenant is not None:
            tenant.check_model(model)
        return service

    def service_of(self, model: str, scope: Scope) -> Service:
        """Return the service that a request for a model goes to.

        Raises:
            ApiError: as `service_named`; 503 when the service is suspended.
        """
        service = self.service_named(model, scope)
        service.check_open()
        return service

    def models_of(self, scope: Scope) -> list[tuple[str, Service]]:
        """Return all names of models that a request's tenant may use, with their services."""
        return self.services.models(tenant_of(scope))

    def ticket(self, scope: Scope, wish: Wish, began: float | None = None, *, first: bool = True) -> Ticket:
        """Return the ticket of one sequence of a request; only the `first` is charged for the prompt.

        Args:
            began: when the request arrived, in seconds of the monotonic clock; now by default.

        Raises:
            ApiError: 400 or 403 for a priority that it may not have.
        """
        deadline = (time.monotonic() if began is None else began) + self.config.queue_timeout_seconds
        service = self.services.find(wish.model)
        most = service.table.context if service is not None else 0
        return new_ticket(scope, wish, deadline, first=first, most_tokens=most)

    def wait_from_now(self, ticket: Ticket) -> None:
        """Let a sequence that begins later than its request wait as long as another."""
        ticket.deadline = time.monotonic() + self.config.queue_timeout_seconds

    @property
    def models(self) -> tuple[str, ...]:
        """All names of models."""
        return tuple(name for name, _ in self.services.models())

    # ── the only service ──────────────────────────────────────────────────────────────────────────────────

    @property
    def only(self) -> Service:
        """The first service, which is the only one unless the gateway is shared.

        Raises:
            LookupError: no service is known yet.
        """
        for service in self.services:
            return service
        raise LookupError("no service is known yet")

    @property
    def table(self) -> EngineTable:
        """The routing table of the only service."""
        return self.only.table

    @property
    def admission(self) -> Admission:
        """The admission of the only service."""
        return self.only.admission

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher of the only service."""
        return self.only.dispatcher

    # ── the admin API ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def engines(self) -> Iterator[Engine]:
        """All engines of all services."""
        return (engine for service in self.services for engine in service.table)

    def services_of(self, name: str | None) -> list[Service]:
        """The service of a name, if there is one; all of them without a name."""
        return [service for service in self.services if name in (None, service.name)]

    @property
    def in_flight(self) -> int:
        """Requests in work."""
        return sum(service.admission.in_flight for service in self.services)

    def is_admin(self, authorization: str) -> bool:
        """Tell whether a header holds the admin API's bearer token."""
        scheme, _, token = authorization.partition(" ")
        given = token.strip().encode()
        known = [hmac.compare_digest(given, one) for one in self._tokens]
        return scheme.lower() == "bearer" and any(known)

    @property
    def has_admin(self) -> bool:
        """Whether there is an admin API."""
        return bool(self._tokens)

    def metrics_text(self) -> bytes:
        """Return all metrics, the gauges as of now."""
        metrics = self.metrics
        metrics.in_flight.clear()
        metrics.load_tokens.clear()
        states: Counter[str] = Counter(dict.fromkeys(STATES, 0))
        for engine in self.engines:
            states[engine.state] += 1
            metrics.in_flight.labels(engine.name).set(engine.requests)
            metrics.load_tokens.labels(engine.name).set(engine.load)
        for state, count in states.items():
            metrics.engines.labels(state).set(count)
        tables = [service.table for service in self.services]
        publish(metrics, tables, sum(service.waiting for service in self.services))
        metrics.queued.set(sum(len(service.admission) for service in self.services))
        metrics.synced.set(self.services.synced)
        unusable = not self.tenants.open and (bool(self.tenants.problem) or not self.tenants.in_force)
        metrics.api_keys_unusable.set(unusable)
        return metrics.text()

    def _new_service(self, entry: ServiceEntry) -> Service:
        return Service(entry, self.config, self.ring, self._name, self.metrics, self.news.tell)


def read_keys(config: GatewayConfig) -> KeyFolder | None:
    """Return the gateway's CURVE keys; a shared gateway's folder may lack a key of engines.

    Raises:
        ValueError: a file cannot be read.
    """
    if not config.keys:
        return None
    folder = Path(config.keys)
    peers = not config.shared or (folder / "engine.public").exists()
    return KeyFolder(folder, "gateway", peers=peers)


def read_tokens(path: str | None) -> tuple[bytes, ...]:
    """Return the admin API's bearer tokens: the file's, and that of the next generation beside it.

    Raises:
        ValueError: the file cannot be read, or is empty.
    """
    if path is None:
        return ()
    file = Path(path)
    found: list[bytes] = []
    for one in (file, file.with_name(NEXT + file.name)):
        try:
            token = one.read_bytes().strip()
        except FileNotFoundError as error:
            if one is file:
                raise ValueError(f"--admin-token-file {one} cannot be read: {error.strerror}") from error
            continue
        except OSError as error:
            raise ValueError(f"--admin-token-file {one} cannot be read: {error.strerror}") from error
        if not token:
            raise ValueError(f"--admin-token-file {one} is empty")
        found.append(token)
    return tuple(found)
