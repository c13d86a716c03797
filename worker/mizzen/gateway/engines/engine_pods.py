"""Engines as the pods of one service, or of all services that share a gateway."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.engines.engine_table import Found
from mizzen.gateway.engines.kube_watch import Metadata, Watch, namespace
from mizzen.gateway.telemetry.metrics import Metrics

SERVICE = "mizzen.dev/service"
ENGINES = "mizzen.dev/component=engine"
SHARED = "mizzen.dev/gateway=shared"
VERIFIED = "mizzen.dev/verified"
"""Readiness gate of a pod that gets no request before the operator has seen it answer right."""


class Port(msgspec.Struct, rename="camel"):
    """A port of a container."""

    container_port: int
    name: str = ""


class Container(msgspec.Struct):
    """A container of a pod."""

    ports: list[Port] | None = None


class Gate(msgspec.Struct, rename="camel"):
    """A readiness gate of a pod."""

    condition_type: str


class Spec(msgspec.Struct, rename="camel"):
    """Spec of a pod; a bookmark's has null for containers."""

    containers: list[Container] | None = None
    readiness_gates: list[Gate] | None = None


class Condition(msgspec.Struct):
    """A condition of a pod."""

    type: str
    status: str


class Status(msgspec.Struct, rename="camel"):
    """Status of a pod."""

    phase: str = ""
    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    conditions: list[Condition] | None = None


class Pod(msgspec.Struct):
    """A pod, as far as discovery looks at it."""

    metadata: Metadata
    spec: Spec = msgspec.field(default_factory=Spec)
    status: Status = msgspec.field(default_factory=Status)


class PodWatch:
    """Keeps the routing table equal to the engine pods of one service."""

    def __init__(
        self, config: GatewayConfig, sync: Callable[[Iterable[Found]], None], metrics: Metrics
    ) -> None:
        """Find the namespace.

        Raises:
            ValueError: it is neither given nor known from the pod.
        """
        self._sync = sync
        self._watch = Watch(
            namespace(config.namespace),
            "pods",
            Pod,
            self._changed,
            metrics.watch_errors.inc,
            labelSelector=f"{SERVICE}={config.service or config.served_name},{ENGINES}",
        )

    async def run(self) -> None:
        """Watch until cancelled. An API server that is away changes nothing in the table."""
        await self._watch.run()

    def _changed(self, pods: Collection[Pod]) -> None:
        self._sync([found for pod in pods if (found := engine(pod)) is not None])


def shared_pods(
    config: GatewayConfig, sync: Callable[[Mapping[str, list[Found]]], None], metrics: Metrics
) -> Watch[Pod]:
    """Return the watch of the engine pods of all services that share a gateway; `sync` gets them by service.

    Raises:
        ValueError: the namespace is neither given nor known from the pod.
    """

    def changed(pods: Collection[Pod]) -> None:
        engines: dict[str, list[Found]] = {}
        for pod in pods:
            found = engine(pod)
            if found is not None:
                engines.setdefault(pod.metadata.labels.get(SERVICE, ""), []).append(found)
        sync(engines)

    where = namespace(config.namespace)
    selector = f"{SHARED},{ENGINES}"
    return Watch(where, "pods", Pod, changed, metrics.watch_errors.inc, labelSelector=selector)


def engine(pod: Pod) -> Found | None:
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
    gated = any(gate.condition_type == VERIFIED for gate in pod.spec.readiness_gates or ())
    host = f"[{pod.status.pod_ip}]" if ":" in pod.status.pod_ip else pod.status.pod_ip
    return Found(
        name=pod.metadata.name,
        uid=pod.metadata.uid,
        endpoint=f"tcp://{host}:{port}",
        revision=pod.metadata.labels.get("mizzen.dev/revision", ""),
        terminating=terminating,
        held=gated and conditions.get(VERIFIED) != "True",
    )
