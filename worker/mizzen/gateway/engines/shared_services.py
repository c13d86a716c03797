"""The services that share this gateway, from one ConfigMap, and their engines, from pods."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

import msgspec

from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.engines.engine_pods import watch_shared_pods
from mizzen.gateway.engines.kube_watch import Metadata, ResourceWatch, watched_namespace
from mizzen.gateway.services import Services, parse_services
from mizzen.gateway.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

FILE = "services.json"


class ConfigMap(msgspec.Struct):
    """A ConfigMap, as far as discovery looks at it."""

    metadata: Metadata
    data: dict[str, str] | None = None


class SharedServicesWatch:
    """Keeps services and engines equal to what the operator lists and the pods that run."""

    def __init__(self, config: GatewayConfig, services: Services, metrics: Metrics) -> None:
        """Find the namespace.

        Raises:
            ValueError: it is neither given nor known from the pod.
        """
        self._services = services
        self._name = config.services_config_map
        self._pods = watch_shared_pods(config, services.sync_engines, metrics)
        self._list = ResourceWatch(
            watched_namespace(config.namespace),
            "configmaps",
            ConfigMap,
            self._changed,
            metrics.watch_errors.inc,
            fieldSelector=f"metadata.name={self._name}",
        )

    async def run(self) -> None:
        """Watch until cancelled. An API server that is away changes nothing."""
        await asyncio.gather(self._list.run(), self._pods.run())

    def _changed(self, found: Collection[ConfigMap]) -> None:
        """Take the list; while there is none, the last one stays in force."""
        for one in found:
            content = (one.data or {}).get(FILE, "")
            try:
                self._services.sync_services(
                    parse_services(content.encode(), f"ConfigMap {self._name}, {FILE}")
                )
            except ValueError as error:
                log.error("services cannot be read", extra={"fields": {"reason": str(error)}})
