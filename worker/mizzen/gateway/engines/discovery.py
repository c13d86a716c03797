# SPDX-License-Identifier: Apache-2.0
"""Discovers services and engines: from options, from a file, or by watching Kubernetes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.engines.discovered_engine import DiscoveredEngine
from mizzen.gateway.services import ServiceEntry, Services, parse_services
from mizzen.gateway.telemetry.metrics import Metrics
from mizzen.wire.curve_keys import KeyFolder
from mizzen.wire.endpoint import require_safe

log = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0
"""Interval at which a services file is checked for changes."""


def new_discovery(
    config: GatewayConfig, keys: KeyFolder | None, services: Services, metrics: Metrics
) -> Coroutine[Any, Any, None]:
    """Return the coroutine that keeps the list of services and engines current until it is cancelled.

    Raises:
        ValueError: an endpoint is malformed or needs keys, a services file cannot be read or is malformed, or
            the namespace to watch is unknown.
    """
    if config.services_file is not None:
        file = ServicesFile(Path(config.services_file), keys, services)
        file.read()
        return file.watch()
    if config.services_config_map:
        from mizzen.gateway.engines.shared_services import SharedServicesWatch

        return SharedServicesWatch(config, services, metrics).run()
    models = tuple(dict.fromkeys((config.served_name, *config.alias)))
    name = config.service or config.served_name
    services.sync_services([ServiceEntry(name=name, models=models, suspended=config.suspended)])
    if config.engine:
        for endpoint in config.engine:
            require_safe(endpoint, keys)
        return report_static(services, {name: config.engine})
    from mizzen.gateway.engines.engine_pods import PodWatch

    def sync(engines: Iterable[DiscoveredEngine]) -> None:
        services.sync_engines({name: list(engines)})

    return PodWatch(config, sync, metrics).run()


async def report_static(services: Services, endpoints: dict[str, tuple[str, ...]]) -> None:
    """Report engines at fixed endpoints once, then wait until cancelled."""
    services.sync_engines(static_engines(endpoints))
    await asyncio.Event().wait()


def static_engines(endpoints: dict[str, tuple[str, ...]]) -> dict[str, list[DiscoveredEngine]]:
    """Return the engines at fixed endpoints, by service name; an engine's name is its endpoint."""
    return {
        name: [
            DiscoveredEngine(name=address, uid="", endpoint=address) for address in dict.fromkeys(addresses)
        ]
        for name, addresses in endpoints.items()
    }


class ServicesFile:
    """The file given by `--services-file`, which lists services and the endpoints of their engines."""

    def __init__(self, path: Path, keys: KeyFolder | None, services: Services) -> None:
        self._path = path
        self._keys = keys
        self._services = services
        self._content = b""
        self._problem = ""

    def read(self) -> None:
        """Apply the file's content if it has changed.

        Raises:
            ValueError: the file cannot be read or is malformed, or an endpoint needs keys; nothing was
                changed.
        """
        try:
            content = self._path.read_bytes()
        except OSError as error:
            raise ValueError(f"--services-file {self._path} cannot be read: {error.strerror}") from error
        if content == self._content:
            return
        entries = parse_services(content, f"--services-file {self._path}")
        for entry in entries:
            for endpoint in entry.engines:
                require_safe(endpoint, self._keys)
        self._services.sync_services(entries)
        self._services.sync_engines(static_engines({entry.name: entry.engines for entry in entries}))
        self._content = content

    async def watch(self) -> None:
        """Apply changes to the file until cancelled."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            try:
                self.read()
                self._problem = ""
            except ValueError as error:
                if str(error) != self._problem:  # logged once, not every second
                    log.error("cannot read services", extra={"fields": {"reason": str(error)}})
                self._problem = str(error)
