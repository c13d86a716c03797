# SPDX-License-Identifier: Apache-2.0
"""Discovers the services that share this gateway (listed in a ConfigMap), and the pods of their engines."""

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
    """Fields of a ConfigMap that discovery needs."""

    metadata: Metadata
    data: dict[str, str] | None = None


class SharedServicesWatch:
    """Keeps services in sync with the operator's ConfigMap, and engines with the running pods."""

    def __init__(self, config: GatewayConfig, services: Services, metrics: Metrics) -> None:
        """Create the watches; `run` starts them.

        Raises:
            ValueError: the namespace is not configured, and the gateway does not run in a pod.
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
        """Watch until cancelled. While the API server is unavailable, services and engines do not change."""
        await asyncio.gather(self._list.run(), self._pods.run())

    def _changed(self, config_maps: Collection[ConfigMap]) -> None:
        """Apply the ConfigMap's list of services; without the ConfigMap, the last list stays in force."""
        for config_map in config_maps:
            content = (config_map.data or {}).get(FILE, "")
            try:
                self._services.sync_services(
                    parse_services(content.encode(), f"ConfigMap {self._name}, {FILE}")
                )
            except ValueError as error:
                log.error("cannot read services", extra={"fields": {"reason": str(error)}})
