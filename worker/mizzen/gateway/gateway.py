# SPDX-License-Identifier: Apache-2.0
"""State of a gateway process that its two servers share.

`main` starts and drains it; the endpoints find services, tenants and limits here.
"""

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

from mizzen.gateway.admission.admission import Admission
from mizzen.gateway.admission.new_entry import new_queue_entry
from mizzen.gateway.admission.queue_entry import QueueEntry
from mizzen.gateway.auth.authentication import TenantRegistry, get_tenant
from mizzen.gateway.config import ONLY_PROCESS, GatewayConfig, ProcessNumber
from mizzen.gateway.engines.discovery import new_discovery
from mizzen.gateway.engines.engine_client import EngineClient
from mizzen.gateway.engines.engine_table import EngineTable
from mizzen.gateway.engines.failure_limits import publish_engine_gauges
from mizzen.gateway.http.malloc_trim import MallocTrimmer
from mizzen.gateway.http.request_bodies import BodyBudget
from mizzen.gateway.images.new_fetcher import new_fetcher
from mizzen.gateway.requests.backpressure import UnreadOutput
from mizzen.gateway.requests.body_reader import BodyReader
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.responses.response_store import ResponseStore, StoreLimits
from mizzen.gateway.routing.dispatcher import Dispatcher
from mizzen.gateway.services import Service, ServiceEntry, Services, model_not_found
from mizzen.gateway.telemetry.access_log import AccessLog
from mizzen.gateway.telemetry.metrics import Metrics
from mizzen.gateway.telemetry.table_watch import TableWatch
from mizzen.gateway.telemetry.tracing import start_tracing
from mizzen.wire.curve_keys import NEXT, KeyFolder, KeyRing

KEY_RELOAD_SECONDS = 1.0
"""Interval at which the gateway's own keys and tokens are checked for changes."""
ENGINE_STATES = ("connecting", "verifying", "warming", "serving", "suspect", "draining", "broken")


class Gateway:
    """State of a gateway process. `start` and `close` run on its event loop."""

    def __init__(self, config: GatewayConfig, process: ProcessNumber = ONLY_PROCESS) -> None:
        """Read the keys and tokens.

        Args:
            config: the options.
            process: number of this process among the gateway's processes.

        Raises:
            ValueError: a key file or the token file cannot be read, or tracing is configured but its
                packages are not installed.
        """
        self.config = config
        self._process = process
        self.metrics = Metrics(lambda: self.model_names)
        self.access_log = AccessLog(config.access_log == "prompts") if config.access_log != "off" else None
        self.tracing = start_tracing(config, self.metrics.dropped_spans.inc)
        self.draining = False
        self.table_watch = TableWatch()
        self.tenants = TenantRegistry(
            config.api_keys_file,
            divided_by=config.key_limits_divided_by,
        )
        self.tenants.on_change = self.table_watch.notify
        self.trimmer = MallocTrimmer()
        self.body_budget = BodyBudget(config.max_bodies_bytes, config.max_body_bytes, self.trimmer.note_freed)
        self.body_reader = BodyReader()
        self.image_fetcher = new_fetcher(config)
        self.unread_output = UnreadOutput()
        self.response_store = new_response_store(config)
        self.services = Services(self._new_service, config.drain_timeout_seconds, lambda: self.curve_keys)
        self._admin_tokens = read_admin_tokens(config.admin_token_file)
        self._name = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._key_folder = load_key_folder(config)
        self._discovery: asyncio.Task[None] | None = None
        self._reload_tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start to discover engines and to reload keys.

        Raises:
            ValueError: an engine's endpoint is malformed or needs keys, or pods are to be watched but there
                is no Kubernetes configuration.
        """
        find = new_discovery(self.config, self._key_folder, self.services, self.metrics)
        self._discovery = asyncio.create_task(find, name="discovery")
        self._reload_tasks = [
            asyncio.create_task(self.tenants.watch(), name="API keys"),
            asyncio.create_task(self._reload_keys(), name="keys"),
            *self._start_limit_sharing(),
        ]
        if self.response_store is not None:
            self._reload_tasks.append(asyncio.create_task(self.response_store.watch(), name="responses"))

    def _start_limit_sharing(self) -> list[asyncio.Task[None]]:
        """Start to share the limits of API keys with the other gateway processes, if there may be others.

        They authenticate each other with the token of the admin API. With --key-limits-divided-by, limits are
        divided without an exchange.
        """
        config = self.config
        alone = bool(config.engine or config.services_file) and self._process.count == 1
        if self.tenants.keyless or alone or not self._admin_tokens or config.key_limits_divided_by > 1:
            return []
        from mizzen.gateway.auth.gateway_peers import GatewayPeers  # aiohttp loads slowly

        sharing = self.tenants.sharing
        peers = GatewayPeers(config, self._process, self.metrics, self._current_token, sharing.set_members)
        return [
            asyncio.create_task(peers.run(), name="gateways"),
            asyncio.create_task(sharing.run(), name="limits"),
        ]

    def _current_token(self) -> str:
        return self._admin_tokens[0].decode()

    async def close(self, reason: str = "the gateway is shutting down") -> None:
        """Reject waiting requests and close all connections; running requests end with an error."""
        self.table_watch.close()
        if self._discovery is None:
            return
        tasks = [self._discovery, *self._reload_tasks]
        self._discovery, self._reload_tasks = None, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.services.close(reason)
        self.body_reader.close()
        self.trimmer.close()

    async def flush(self) -> None:
        """Write out the access log and the traces, including those of requests that `close` ended."""
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        if self.access_log is not None:
            await asyncio.to_thread(self.access_log.close)

    @property
    def curve_keys(self) -> KeyRing | None:
        """Current CURVE keys of the gateway; None if it has none."""
        return self._key_folder.ring if self._key_folder is not None else None

    async def _reload_keys(self) -> None:
        """Apply changes to key and token files until cancelled."""
        while True:
            await asyncio.sleep(KEY_RELOAD_SECONDS)
            with contextlib.suppress(ValueError):  # a file that cannot be read changes nothing
                self._admin_tokens = read_admin_tokens(self.config.admin_token_file)
            if self._key_folder is not None and self._key_folder.refresh():
                self.services.apply_own_keys()
                self.table_watch.notify()

    @property
    def not_ready_reason(self) -> str:
        """Reason why this gateway should get no traffic; empty if it is ready."""
        if self.draining:
            return "draining"
        if self._discovery is None or self._discovery.done():
            return "discovery is not running"
        if not self.services.services_known:
            return "the services are not known yet"
        return "" if self.services.synced else "the engines are not known yet"

    @property
    def not_serving_reason(self) -> str:
        """Reason why no request would be served now; empty if at least one service serves requests."""
        if self.not_ready_reason:
            return self.not_ready_reason
        reasons = {service.not_serving_reason for service in self.services}
        return "" if "" in reasons else "; ".join(sorted(reasons)) or "there are no services"

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────

    def find_service(self, model: str, scope: Scope) -> Service:
        """Return the service that serves a model, which the request's tenant must be allowed to use.

        Raises:
            ApiError: 404 if no service serves the model, 403 if the tenant may not use it.
        """
        service, tenant = self.services.find_by_model(model), get_tenant(scope)
        if service is None:
            raise model_not_found(model, (name for name, _ in self.services.list_models(tenant)))
        if tenant is not None:
            tenant.check_model(model)
        return service

    def find_active_service(self, model: str, scope: Scope) -> Service:
        """Return the service that serves a model, which must not be suspended.

        Raises:
            ApiError: 404 if no service serves the model, 403 if the tenant may not use it, 503 if the service
                is suspended.
        """
        service = self.find_service(model, scope)
        service.check_not_suspended()
        return service

    def models_for(self, scope: Scope) -> list[tuple[str, Service]]:
        """Return the model names that a request's tenant may use, with their services."""
        return self.services.list_models(get_tenant(scope))

    def new_queue_entry(
        self, scope: Scope, generation: GenerationRequest, began: float | None = None, *, first: bool = True
    ) -> QueueEntry:
        """Return the queue entry of one sequence of a request.

        Args:
            scope: ASGI scope of the request.
            generation: the sequence's request.
            began: time when the request arrived, on the monotonic clock; now by default.
            first: whether this is the request's first sequence, to which the prompt tokens are charged.

        Raises:
            ApiError: 400 or 403 for a priority that the tenant may not use.
        """
        deadline = (time.monotonic() if began is None else began) + self.config.queue_timeout_seconds
        service = self.services.find_by_model(generation.model)
        max_context = service.table.max_context_length if service is not None else 0
        return new_queue_entry(scope, generation, deadline, first=first, max_tokens=max_context)

    def body_limit(self) -> int:
        """Return the maximum size of a request body in bytes; it is larger while a model reads images."""
        texts = (engine.text_model for engine in self.engines)
        if any(text is not None and text.image_rules is not None for text in texts):
            return max(self.config.max_body_bytes, self.config.max_image_body_bytes)
        return self.config.max_body_bytes

    def restart_queue_timeout(self, queue_entry: QueueEntry) -> None:
        """Restart the queue timeout of a sequence that begins later than its request."""
        queue_entry.deadline = time.monotonic() + self.config.queue_timeout_seconds

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names and aliases of all models."""
        return tuple(name for name, _ in self.services.list_models())

    # ── the only service ──────────────────────────────────────────────────────────────────────────────────

    @property
    def only_service(self) -> Service:
        """The first service, which is the only one unless the gateway is shared.

        Raises:
            LookupError: no service is known yet.
        """
        for service in self.services:
            return service
        raise LookupError("no service is known yet")

    @property
    def table(self) -> EngineTable:
        """Routing table of `only_service`."""
        return self.only_service.table

    @property
    def admission(self) -> Admission:
        """Admission of `only_service`."""
        return self.only_service.admission

    @property
    def dispatcher(self) -> Dispatcher:
        """Dispatcher of `only_service`."""
        return self.only_service.dispatcher

    # ── the admin API ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def engines(self) -> Iterator[EngineClient]:
        """All engines of all services."""
        return (engine for service in self.services for engine in service.table)

    def list_services(self, name: str | None) -> list[Service]:
        """Return all services if `name` is None, else the service called `name`, if it exists."""
        return [service for service in self.services if name in (None, service.name)]

    @property
    def in_flight(self) -> int:
        """Number of requests in flight."""
        return sum(service.admission.in_flight for service in self.services)

    def is_admin(self, authorization: str) -> bool:
        """Return whether an Authorization header holds a bearer token of the admin API."""
        scheme, _, token = authorization.partition(" ")
        presented = token.strip().encode()
        matches = [hmac.compare_digest(presented, candidate) for candidate in self._admin_tokens]
        return scheme.lower() == "bearer" and any(matches)

    @property
    def admin_enabled(self) -> bool:
        """True if the admin API is enabled."""
        return bool(self._admin_tokens)

    def metrics_text(self) -> bytes:
        """Update the gauges, and return all metrics in Prometheus' text format."""
        metrics = self.metrics
        metrics.in_flight.clear()
        metrics.load_tokens.clear()
        states: Counter[str] = Counter(dict.fromkeys(ENGINE_STATES, 0))
        for engine in self.engines:
            states[engine.state] += 1
            metrics.in_flight.labels(engine.name).set(engine.requests)
            metrics.load_tokens.labels(engine.name).set(engine.load)
        for state, count in states.items():
            metrics.engines.labels(state).set(count)
        tables = [service.table for service in self.services]
        publish_engine_gauges(metrics, tables, sum(service.waiting_requests for service in self.services))
        metrics.queued.set(sum(len(service.admission) for service in self.services))
        metrics.synced.set(self.services.synced)
        unusable = not self.tenants.keyless and (bool(self.tenants.problem) or not self.tenants.key_count)
        metrics.api_keys_unusable.set(unusable)
        return metrics.render()

    def _new_service(self, entry: ServiceEntry) -> Service:
        return Service(entry, self.config, self.curve_keys, self._name, self.metrics, self.table_watch.notify)


def new_response_store(config: GatewayConfig) -> ResponseStore | None:
    """Return the store of responses, or None if responses are not stored."""
    if not config.response_store_seconds:
        return None
    limits = StoreLimits(
        config.response_store_seconds, config.response_store_size, config.response_store_bytes
    )
    return ResponseStore(limits)


def load_key_folder(config: GatewayConfig) -> KeyFolder | None:
    """Return the folder with the gateway's CURVE keys, or None if none is configured.

    The folder of a shared gateway may lack the engines' public key, because the list of services (see
    `SharedServicesWatch`) contains the public keys of each service's engines.

    Raises:
        ValueError: a file cannot be read.
    """
    if not config.keys:
        return None
    folder = Path(config.keys)
    peers = not config.shared or (folder / "engine.public").exists()
    return KeyFolder(folder, "gateway", peers=peers)


def read_admin_tokens(path: str | None) -> tuple[bytes, ...]:
    """Return the admin API's bearer tokens; an empty tuple if `path` is None.

    One token is in the file at `path`. During a rotation, another is in the same folder, in the file whose
    name has the prefix `next.`.

    Raises:
        ValueError: the file at `path` does not exist, or one of the files cannot be read or is empty.
    """
    if path is None:
        return ()
    current = Path(path)
    tokens: list[bytes] = []
    for file in (current, current.with_name(NEXT + current.name)):
        try:
            token = file.read_bytes().strip()
        except FileNotFoundError as error:
            if file is current:
                raise ValueError(f"--admin-token-file {file} cannot be read: {error.strerror}") from error
            continue
        except OSError as error:
            raise ValueError(f"--admin-token-file {file} cannot be read: {error.strerror}") from error
        if not token:
            raise ValueError(f"--admin-token-file {file} is empty")
        tokens.append(token)
    return tuple(tokens)
