"""Engines as the pods of one service, or of all services that share a gateway."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.engines.discovered_engine import DiscoveredEngine
from mizzen.gateway.engines.kube_watch import Metadata, ResourceWatch, watched_namespace
from mizzen.gateway.telemetry.metrics import Metrics

SERVICE_LABEL = "mizzen.dev/service"
ENGINE_SELECTOR = "mizzen.dev/component=engine"
SHARED_SELECTOR = "mizzen.dev/gateway=shared"
VERIFIED_GATE = "mizzen.dev/verified"
"""Readiness gate of a pod that gets no request before the operator has seen it answer right."""


class ContainerPort(msgspec.Struct, rename="camel"):
    """A port of a container."""

    container_port: int
    name: str = ""


class PodContainer(msgspec.Struct):
    """A container of a pod."""

    ports: list[ContainerPort] | None = None


class ReadinessGate(msgspec.Struct, rename="camel"):
    """A readiness gate of a pod."""

    condition_type: str


class PodSpec(msgspec.Struct, rename="camel"):
    """Spec of a pod; a bookmark's has null for containers."""

    containers: list[PodContainer] | None = None
    readiness_gates: list[ReadinessGate] | None = None


class PodCondition(msgspec.Struct):
    """A condition of a pod."""

    type: str
    status: str


class PodStatus(msgspec.Struct, rename="camel"):
    """Status of a pod."""

    phase: str = ""
    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    conditions: list[PodCondition] | None = None


class EnginePod(msgspec.Struct):
    """A pod, as far as discovery looks at it."""

    metadata: Metadata
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class PodWatch:
    """Keeps the routing table equal to the engine pods of one service."""

    def __init__(
        self, config: GatewayConfig, sync: Callable[[Iterable[DiscoveredEngine]], None], metrics: Metrics
    ) -> None:
        """Find the namespace.

        Raises:
            ValueError: it is neither given nor known from the pod.
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
        """Watch until cancelled. An API server that is away changes nothing in the table."""
        await self._watch.run()

    def _changed(self, pods: Collection[EnginePod]) -> None:
        self._sync([found for pod in pods if (found := discover_engine(pod)) is not None])


def watch_shared_pods(
    config: GatewayConfig, sync: Callable[[Mapping[str, list[DiscoveredEngine]]], None], metrics: Metrics
) -> ResourceWatch[EnginePod]:
    """Return the watch of the engine pods of all services that share a gateway; `sync` gets them by service.

    Raises:
        ValueError: the namespace is neither given nor known from the pod.
    """

    def changed(pods: Collection[EnginePod]) -> None:
        engines: dict[str, list[DiscoveredEngine]] = {}
        for pod in pods:
            found = discover_engine(pod)
            if found is not None:
                engines.setdefault(pod.metadata.labels.get(SERVICE_LABEL, ""), []).append(found)
        sync(engines)

    where = watched_namespace(config.namespace)
    selector = f"{SHARED_SELECTOR},{ENGINE_SELECTOR}"
    return ResourceWatch(where, "pods", EnginePod, changed, metrics.watch_errors.inc, labelSelector=selector)


def discover_engine(pod: EnginePod) -> DiscoveredEngine | None:
    """Return a pod's engine; None before its containers are ready, without address or port, or once ended.

    A pod that is being deleted is reported as terminating, so that what runs there can end.
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
    host = f"[{pod.status.pod_ip}]" if ":" in pod.status.pod_ip else pod.status.pod_ip
    return DiscoveredEngine(
        name=pod.metadata.name,
        uid=pod.metadata.uid,
        endpoint=f"tcp://{host}:{port}",
        revision=pod.metadata.labels.get("mizzen.dev/revision", ""),
        terminating=terminating,
        awaiting_verification=gated and conditions.get(VERIFIED_GATE) != "True",
    )
