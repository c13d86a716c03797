# SPDX-License-Identifier: Apache-2.0
"""Discovers engines by watching the pods of one service, or of all services that share a gateway."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from mizzen.common.addresses import join_address
from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.engines.discovered_engine import DiscoveredEngine
from mizzen.gateway.engines.kube_watch import Metadata, ResourceWatch, watched_namespace
from mizzen.gateway.telemetry.metrics import Metrics

SERVICE_LABEL = "mizzen.dev/service"
ENGINE_SELECTOR = "mizzen.dev/component=engine"
SHARED_SELECTOR = "mizzen.dev/gateway=shared"
VERIFIED_GATE = "mizzen.dev/verified"
"""Readiness gate of pods that get no requests before the operator has verified their output."""


class ContainerPort(msgspec.Struct, rename="camel"):
    """Port of a container."""

    container_port: int
    name: str = ""


class PodContainer(msgspec.Struct):
    """Container of a pod."""

    ports: list[ContainerPort] | None = None


class ReadinessGate(msgspec.Struct, rename="camel"):
    """Readiness gate of a pod."""

    condition_type: str


class PodSpec(msgspec.Struct, rename="camel"):
    """Spec of a pod; `containers` is null in a bookmark event."""

    containers: list[PodContainer] | None = None
    readiness_gates: list[ReadinessGate] | None = None


class PodCondition(msgspec.Struct):
    """Condition of a pod."""

    type: str
    status: str


class PodStatus(msgspec.Struct, rename="camel"):
    """Status of a pod."""

    phase: str = ""
    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    conditions: list[PodCondition] | None = None


class EnginePod(msgspec.Struct):
    """Fields of a pod that discovery needs."""

    metadata: Metadata
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class PodWatch:
    """Keeps the routing table in sync with the engine pods of one service."""

    def __init__(
        self, config: GatewayConfig, sync: Callable[[Iterable[DiscoveredEngine]], None], metrics: Metrics
    ) -> None:
        """Create a watch; `sync` is called with all engines after each change.

        Raises:
            ValueError: the namespace is not configured, and the gateway does not run in a pod.
        """
        self._sync = sync
        self._watch = ResourceWatch(
            watched_namespace(config.namespace),
            "pods",
            EnginePod,
            self._changed,
            metrics.watch_errors.inc,
            labelSelector=f"{SERVICE_LABEL}={config.service or config.served_name},{ENGINE_SELECTOR}",
        )

    async def run(self) -> None:
        """Watch until cancelled. While the API server is unavailable, the routing table does not change."""
        await self._watch.run()

    def _changed(self, pods: Collection[EnginePod]) -> None:
        self._sync([discovered for pod in pods if (discovered := discover_engine(pod)) is not None])


def watch_shared_pods(
    config: GatewayConfig, sync: Callable[[Mapping[str, list[DiscoveredEngine]]], None], metrics: Metrics
) -> ResourceWatch[EnginePod]:
    """Return the watch of the engine pods of all services that share a gateway.

    After each change, `sync` is called with all engines, grouped by service name.

    Raises:
        ValueError: the namespace is not configured, and the gateway does not run in a pod.
    """

    def changed(pods: Collection[EnginePod]) -> None:
        engines: dict[str, list[DiscoveredEngine]] = {}
        for pod in pods:
            discovered = discover_engine(pod)
            if discovered is not None:
                engines.setdefault(pod.metadata.labels.get(SERVICE_LABEL, ""), []).append(discovered)
        sync(engines)

    target_namespace = watched_namespace(config.namespace)
    selector = f"{SHARED_SELECTOR},{ENGINE_SELECTOR}"
    return ResourceWatch(
        target_namespace, "pods", EnginePod, changed, metrics.watch_errors.inc, labelSelector=selector
    )


def discover_engine(pod: EnginePod) -> DiscoveredEngine | None:
    """Return the engine of a pod, or None if the pod cannot serve requests.

    A pod can serve if it has an address and a port `wire`, its containers are ready, and it has not ended.
    While a pod is being deleted, its engine is returned as terminating, so that its requests can finish, even
    if the containers are not ready.
    """
    conditions = {condition.type: condition.status for condition in pod.status.conditions or ()}
    port = next(
        (p.container_port for c in pod.spec.containers or () for p in c.ports or () if p.name == "wire"), None
    )
    terminating = pod.metadata.deletion_timestamp is not None
    ready = terminating or conditions.get("ContainersReady") == "True"
    if not ready or port is None or not pod.status.pod_ip or pod.status.phase in ("Succeeded", "Failed"):
        return None
    gated = any(gate.condition_type == VERIFIED_GATE for gate in pod.spec.readiness_gates or ())
    return DiscoveredEngine(
        name=pod.metadata.name,
        uid=pod.metadata.uid,
        endpoint=f"tcp://{join_address(pod.status.pod_ip, port)}",
        revision=pod.metadata.labels.get("mizzen.dev/revision", ""),
        terminating=terminating,
        awaiting_verification=gated and conditions.get(VERIFIED_GATE) != "True",
    )
