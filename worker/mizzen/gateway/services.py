# SPDX-License-Identifier: Apache-2.0
"""Services of a gateway, found by model name. Each has its own engines, admission and dispatcher."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated

import msgspec

from mizzen.gateway.admission.admission import Admission
from mizzen.gateway.auth.tenant import Tenant
from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.engines.discovered_engine import DiscoveredEngine
from mizzen.gateway.engines.engine_table import EngineTable
from mizzen.gateway.engines.failure_limits import breaker_limits, resume_limits, warm_limits
from mizzen.gateway.errors import ApiError, unavailable
from mizzen.gateway.requests.prompt_scores.scored_prompts import ScoredPrompts
from mizzen.gateway.routing.dispatcher import Dispatcher
from mizzen.gateway.routing.router import default_router
from mizzen.gateway.routing.warmup import CacheWarmer
from mizzen.gateway.telemetry.metrics import Metrics
from mizzen.wire.curve_keys import KeyRing

log = logging.getLogger(__name__)

SUSPENDED_RETRY_SECONDS = 30.0
"""Time after which a client of a suspended service may retry."""
MAX_SERVICES = 1000


class ServiceEntry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True
):
    """One service in `services.json`."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=63)]
    """Name of the InferenceService, with which its engine pods are labelled."""
    models: tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=256)], ...] = ()
    """Names of the service's model in requests: the main name, then aliases."""
    suspended: bool = False
    engine_public_key: Annotated[str, msgspec.Meta(min_length=40, max_length=40)] | None = None
    """CURVE public key of the service's engines, in Z85."""
    next_engine_public_key: Annotated[str, msgspec.Meta(min_length=40, max_length=40)] | None = None
    """Key that will replace `engine_public_key`; only set during a rotation."""
    keys_generation: int = 0
    """Generation of `engine_public_key`; it determines the port on which engines use that key."""
    engines: tuple[str, ...] = ()
    """ZMQ endpoints of the service's engines, if pods are not watched."""


class ServiceList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of `services.json`. If two services claim a model name, the first one gets it."""

    services: Annotated[tuple[ServiceEntry, ...], msgspec.Meta(max_length=MAX_SERVICES)]


def engine_keys(entry: ServiceEntry, keys: KeyRing | None) -> KeyRing | None:
    """Return the keys for connections to a service's engines.

    Returns None if `keys` is None, or if neither `keys` nor the entry has a public key of the engines.
    """
    if keys is not None and entry.engine_public_key:
        public_keys = (entry.engine_public_key, entry.next_engine_public_key)
        peers = tuple(key.encode() for key in public_keys if key)
        keys = replace(keys, peers=peers, generation=entry.keys_generation)
    return keys if keys is not None and keys.peers else None


class Service:
    """One service: its routing table, admission and dispatcher."""

    def __init__(
        self,
        entry: ServiceEntry,
        config: GatewayConfig,
        keys: KeyRing | None,
        name: str,
        metrics: Metrics,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a service.

        Args:
            entry: the service's entry in the list of services.
            config: options of the gateway.
            keys: the gateway's current CURVE keys.
            name: name by which the gateway introduces itself to engines.
            metrics: metrics of the gateway.
            notify: called when the service's engines or its waiting requests may have changed.
        """
        self.entry = entry
        self._notify = notify
        self._can_be_woken = config.wake_timeout_seconds > 0
        self.table = EngineTable(
            gateway=name,
            keys=engine_keys(entry, keys),
            timeout_seconds=config.engine_timeout_seconds,
            lost_seconds=config.engine_lost_seconds,
            suspect_seconds=config.engine_suspect_seconds,
            stuck_seconds=config.engine_stuck_seconds,
            breaker=breaker_limits(config),
            prefix_blocks=config.prefix_index_blocks,
            cache_warmer=CacheWarmer(warm_limits(config), metrics),
            on_change=self._changed,
        )
        self.admission = Admission(
            self.table.capacity,
            max_in_flight=config.max_in_flight,
            max_tokens_in_flight=config.max_tokens_in_flight,
            queue_size=config.queue_size,
            unavailable_reason=self.table.unavailable_reason,
            on_queue_change=notify,
        )
        self.scored_prompts = ScoredPrompts()
        self.dispatcher = Dispatcher(
            self.table,
            self.admission,
            default_router(config.load_factor_percent),
            metrics,
            config.max_attempts,
            resume=resume_limits(config),
            wake_seconds=config.wake_timeout_seconds,
        )

    def use_keys(self, keys: KeyRing | None) -> None:
        """Apply new keys of the gateway; the engines' public keys are in `entry`."""
        self.table.use_keys(engine_keys(self.entry, keys))

    def _changed(self) -> None:
        self.admission.admit_waiting()
        self._notify()

    @property
    def name(self) -> str:
        """Name of the InferenceService."""
        return self.entry.name

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the service's model in requests: the main name, then aliases."""
        return self.entry.models

    @property
    def waiting_requests(self) -> int:
        """Number of waiting requests if no engine serves, else 0; if positive, an engine should start."""
        return 0 if self.table.serving else len(self.admission)

    @property
    def not_serving_reason(self) -> str:
        """Reason why requests would not be served now; empty if they would be.

        A service that may be scaled to zero serves requests: they wait until one of them has started an
        engine.
        """
        if self.entry.suspended:
            return "the service is suspended"
        return "" if self.table.serving or self._can_be_woken else self.table.unavailable_reason()

    def check_not_suspended(self) -> None:
        """Check that the service is not suspended.

        Raises:
            ApiError: 503 if it is suspended.
        """
        if self.entry.suspended:
            text = "the service is suspended" if not self.models else f"{self.models[0]} is suspended"
            raise unavailable(text, SUSPENDED_RETRY_SECONDS, code="suspended")

    async def close(self, reason: str) -> None:
        """Reject waiting requests and close all connections; running requests end with an error."""
        self.admission.close(reason)
        await self.table.close()

    async def drain(self, reason: str, seconds: float) -> None:
        """Reject waiting requests, wait up to `seconds` for running ones, then close all connections."""
        self.admission.close(reason)
        try:
            async with asyncio.timeout(seconds):
                await self.admission.drained.wait()
        except TimeoutError:
            pass
        finally:
            await self.table.close()


class Services:
    """All services of a gateway, found by service name or model name."""

    def __init__(
        self,
        new_service: Callable[[ServiceEntry], Service],
        retire_seconds: float,
        keys: Callable[[], KeyRing | None] = lambda: None,
    ) -> None:
        """Create an empty set of services.

        Args:
            new_service: creates a service from its entry.
            retire_seconds: maximum time for which the running requests of a removed service continue.
            keys: returns the gateway's current CURVE keys.
        """
        self._new_service = new_service
        self._keys = keys
        self._retire_seconds = retire_seconds
        self._services: dict[str, Service] = {}
        self._models: dict[str, Service] = {}
        self._engines: Mapping[str, list[DiscoveredEngine]] | None = None
        self._draining: set[asyncio.Task[None]] = set()
        self.services_known = False
        """True once the list of services is known."""

    def __iter__(self) -> Iterator[Service]:
        return iter(tuple(self._services.values()))

    def __len__(self) -> int:
        return len(self._services)

    @property
    def synced(self) -> bool:
        """True once all services and their engines are known."""
        return self.services_known and all(service.table.synced for service in self)

    def get(self, name: str) -> Service | None:
        """Return the service called `name`, or None."""
        return self._services.get(name)

    def find_by_model(self, model: str) -> Service | None:
        """Return the service that serves a model, or None."""
        return self._models.get(model)

    def list_models(self, tenant: Tenant | None = None) -> list[tuple[str, Service]]:
        """Return the model names that `tenant` may use (all names if it is None), each with its service."""
        return [
            (name, service)
            for name, service in self._models.items()
            if tenant is None or tenant.may_use(name)
        ]

    def sync_services(self, entries: Iterable[ServiceEntry]) -> None:
        """Apply the complete list of services; drain services that are no longer in it."""
        entries_by_name = {entry.name: entry for entry in entries}
        for name, service in tuple(self._services.items()):
            entry = entries_by_name.get(name)
            if entry is None:
                del self._services[name]
                self._start_draining(service)
        for name, entry in entries_by_name.items():
            service = self._services.get(name)
            if service is None:
                service = self._new_service(entry)
            service.entry = entry
            service.use_keys(self._keys())
            self._services[name] = service
        self._services = {name: self._services[name] for name in entries_by_name}
        self._models = map_models(self._services.values())
        self.services_known = True
        self._assign_engines()

    def sync_engines(self, engines: Mapping[str, list[DiscoveredEngine]]) -> None:
        """Apply the complete set of discovered engines, by service name."""
        self._engines = engines
        self._assign_engines()

    def apply_own_keys(self) -> None:
        """Make all services use the gateway's current keys, after these have changed."""
        for service in self:
            service.use_keys(self._keys())

    async def close(self, reason: str) -> None:
        """Close all services."""
        for task in tuple(self._draining):
            task.cancel()
        await asyncio.gather(
            *(service.close(reason) for service in self), *self._draining, return_exceptions=True
        )

    def _assign_engines(self) -> None:
        if self._engines is None:
            return
        for service in self:
            service.table.sync(self._engines.get(service.name, ()))

    def _start_draining(self, service: Service) -> None:
        reason = f"{service.name} is no longer served here"
        work = service.drain(reason, self._retire_seconds)
        task = asyncio.get_running_loop().create_task(work)
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)


def map_models(services: Iterable[Service]) -> dict[str, Service]:
    """Return the service of each model name; if several claim a name, the first gets it."""
    owners: dict[str, Service] = {}
    for service in services:
        for name in service.models:
            owner = owners.setdefault(name, service)
            if owner is not service:
                fields = {"model": name, "service": service.name, "owner": owner.name}
                log.warning("model name belongs to another service", extra={"fields": fields})
    return owners


def model_not_found(model: str, served_names: Iterable[str]) -> ApiError:
    """Return the 404 error for a model that no service serves."""
    names = list(served_names)
    listed_names = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return ApiError(
        404,
        f"the model {model[:200]!r} does not exist here; available models: {listed_names or 'none'}",
        param="model",
        code="model_not_found",
    )


def parse_services(content: bytes, where: str) -> tuple[ServiceEntry, ...]:
    """Parse the content of a `services.json`.

    Raises:
        ValueError: the content is malformed, or two services have the same name; the message names the
            source, `where`.
    """
    try:
        entries = msgspec.json.decode(content, type=ServiceList).services
    except msgspec.DecodeError as error:
        raise ValueError(f"{where}: {error}") from None
    names = [entry.name for entry in entries]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ValueError(f"{where}: two services are named {duplicate}; choose another name for one")
    return entries
