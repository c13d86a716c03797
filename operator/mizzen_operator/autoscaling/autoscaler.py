# SPDX-License-Identifier: Apache-2.0
"""Samples the load of autoscaled services every few seconds, and writes `spec.replicas` through `/scale`.

`policy.py` decides on the number of groups. If a HorizontalPodAutoscaler (HPA) also targets the service,
nothing is written, and the condition ScalingActive reports the HPA. HPAs are looked up once a minute, and
before each write.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.parse import InvalidServiceError, parse_service
from mizzen_operator.api.types import MAX_SCALE_HISTORY, Autoscaling
from mizzen_operator.autoscaling.policy import EngineLoad, Sample, Scale, ScalingState, decide
from mizzen_operator.autoscaling.scaling_metrics import ScalingMetrics
from mizzen_operator.gateway_client.watch import GatewayWatch
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.objects import timestamp
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.metrics import Metrics

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 5.0
HPA_CHECK_SECONDS = 60.0
"""Interval at which HPAs are looked up for a service whose replicas do not change."""
MAX_CONCURRENT_PER_NAMESPACE, MAX_CONCURRENT = 16, 64
"""Maximum number of concurrent decisions per namespace, and in total.

A decision may have to wait for a hung gateway.
"""


@dataclass(slots=True)
class _ServiceScaling:
    """State of one autoscaled service.

    Attributes:
        uid: uid of the service.
        state: state for the next decision.
        scale_history: changes of replicas by this process, the latest last, in the form of
            `status.scaleHistory`.
    """

    uid: str = ""
    state: ScalingState = field(default_factory=ScalingState)
    competing_hpa: str = ""
    """Name of a HorizontalPodAutoscaler that scales the service too; empty if none does."""
    hpas_checked_at: float = float("-inf")
    scale_history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class Autoscaler:
    """Scales all services with `spec.autoscaling`.

    Each reconcile of a service calls `observe_service`, which registers the service.
    """

    def __init__(
        self,
        kube: KubeClient,
        gateway_watch: GatewayWatch,
        metrics: Metrics,
        enqueue: Callable[[ServiceKey], None],
    ) -> None:
        """Create an autoscaler that reads the load from the gateways of `gateway_watch`.

        It calls `enqueue` with each service whose status must change.
        """
        self._kube = kube
        self._enqueue = enqueue
        self._gateway_watch = gateway_watch
        self._metrics = metrics
        self._scaling_metrics = ScalingMetrics(metrics.registry)
        self._services: dict[ServiceKey, _ServiceScaling] = {}
        self._due: defaultdict[str, set[ServiceKey]] = defaultdict(set)
        """Services that are due for a decision, by namespace."""
        self._busy_namespaces: set[str] = set()
        """Namespaces with decisions in progress."""
        self._total_slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._wake = asyncio.Event()

    def observe_service(self, key: ServiceKey, settings: Autoscaling | None, uid: str = "") -> None:
        """Begin to scale a service, or stop if `settings` is None; a new uid resets the service's state."""
        if settings is None:
            self._forget(key)
        elif key not in self._services or self._services[key].uid != uid:
            self._services[key] = _ServiceScaling(uid)

    def _forget(self, key: ServiceKey) -> None:
        self._services.pop(key, None)
        self._scaling_metrics.forget(key)

    def competing_hpa(self, key: ServiceKey) -> str:
        """Return the name of a HorizontalPodAutoscaler that scales a service too; empty if none does."""
        return self._services[key].competing_hpa if key in self._services else ""

    def scale_history(self, key: ServiceKey) -> Sequence[Mapping[str, Any]]:
        """Return this process's scale changes of a service, the latest last, as in `status.scaleHistory`."""
        return tuple(self._services[key].scale_history) if key in self._services else ()

    def decide_now(self, key: ServiceKey) -> None:
        """Decide on a service at once if its requests wait because no engine serves; else do nothing."""
        if key in self._services and self._gateway_watch.holds_requests(key):
            self._due[key.namespace].add(key)
            self._wake.set()

    async def run(self) -> None:
        """Decide on each service every PERIOD_SECONDS until cancelled."""
        due = time.monotonic() + PERIOD_SECONDS
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    async with asyncio.timeout(max(0.0, due - time.monotonic())):
                        await self._wake.wait()
                except TimeoutError:
                    due = time.monotonic() + PERIOD_SECONDS * random.uniform(0.9, 1.0)
                    for key in self._services:
                        self._due[key.namespace].add(key)
                self._wake.clear()
                for namespace in self._due.keys() - self._busy_namespaces:
                    self._busy_namespaces.add(namespace)
                    group.create_task(self._decide_namespace(namespace))

    async def _decide_namespace(self, namespace: str) -> None:
        """Decide on a namespace's due services; slow decisions do not delay other namespaces."""
        slots = asyncio.Semaphore(MAX_CONCURRENT_PER_NAMESPACE)
        await asyncio.gather(*(self._decide_in_slot(key, slots) for key in self._due.pop(namespace)))
        self._busy_namespaces.discard(namespace)
        if namespace in self._due:
            self._wake.set()

    async def _decide_in_slot(self, key: ServiceKey, slots: asyncio.Semaphore) -> None:
        async with slots, self._total_slots:
            try:
                await self._decide(key)
            except KubeError as error:
                if error.code != 409:  # 409: the service has changed; the next decision uses the new version
                    logger.warning("%s/%s: cannot scale: %s", *key, error)
            except Exception:
                logger.exception("%s/%s: unexpected error", *key)

    async def _decide(self, key: ServiceKey) -> None:
        scaling = self._services.get(key)
        body = await self._kube.get(ObjectRef(labels.KIND, *key))
        if scaling is None or body is None or "deletionTimestamp" in body["metadata"]:
            self._forget(key)
            return
        try:
            service = parse_service(body)
        except InvalidServiceError:
            return  # the service's reconcile reports the invalid spec
        if service.autoscaling is None or service.suspend or await self._has_competing_hpa(key, scaling):
            self._scaling_metrics.forget(key)
            return
        now = time.monotonic()
        state = scaling.state
        if not state.recommendations:  # without a history, do not scale down earlier than with one
            state = replace(state, recommendations=((now, service.replicas),))
        sample = merge_tables(await self._gateway_watch.fetch_tables(key))
        self._scaling_metrics.update(key, service.autoscaling, service.replicas, sample)
        scale, scaling.state = decide(service.autoscaling, service.replicas, sample, state, now)
        if scale is not None and not await self._has_competing_hpa(key, scaling, older_than=0.0):
            await self._write(key, scaling, scale, body["metadata"]["resourceVersion"])

    async def _write(self, key: ServiceKey, scaling: _ServiceScaling, scale: Scale, version: str) -> None:
        patch = {"metadata": {"resourceVersion": version}, "spec": {"replicas": scale.after}}
        scaling.state = replace(scaling.state, recommendations=())
        await self._kube.patch(ObjectRef(labels.KIND, *key, "scale"), patch)
        logger.info("%s/%s: scaled from %d to %d groups (%s)", *key, scale.before, scale.after, scale.reason)
        self._metrics.actions.labels("Scale").inc()
        self._scaling_metrics.count_decision(key, scale.reason)
        done = {"from": scale.before, "to": scale.after, "reason": scale.reason}
        scaling.scale_history.append({"time": timestamp(datetime.now(UTC)), **done})
        del scaling.scale_history[:-MAX_SCALE_HISTORY]
        self._enqueue(key)

    async def _has_competing_hpa(
        self, key: ServiceKey, scaling: _ServiceScaling, older_than: float = HPA_CHECK_SECONDS
    ) -> bool:
        """Return whether a HorizontalPodAutoscaler also scales a service.

        HPAs are looked up again if the last lookup is older than `older_than` seconds.
        """
        if time.monotonic() - scaling.hpas_checked_at > older_than:
            others = await self._kube.list(ObjectRef("HorizontalPodAutoscaler", key.namespace))
            before, scaling.competing_hpa = scaling.competing_hpa, competing_hpa(others, key.name)
            scaling.hpas_checked_at = time.monotonic()
            if scaling.competing_hpa != before:
                if scaling.competing_hpa:
                    text = "%s/%s: HorizontalPodAutoscaler %r also scales the service; not scaling it"
                    logger.warning(text, *key, scaling.competing_hpa)
                else:
                    logger.info("%s/%s: HorizontalPodAutoscaler %r is gone; scaling again", *key, before)
                self._enqueue(key)
        return bool(scaling.competing_hpa)


def competing_hpa(autoscalers: Iterable[Mapping[str, Any]], service: str) -> str:
    """Return the name of the first HorizontalPodAutoscaler that targets a service; empty if none does.

    Other APIs have a kind `InferenceService` too. The version does not matter, because Kubernetes ignores it.
    """
    wanted = (labels.GROUP, labels.KIND, service)
    for body in autoscalers:
        target = body["spec"]["scaleTargetRef"]
        group = target.get("apiVersion", "").partition("/")[0]
        if (group, target.get("kind"), target.get("name")) == wanted:
            return body["metadata"]["name"]
    return ""


def merge_tables(tables: Iterable[Mapping[str, Any]] | None) -> Sample | None:
    """Merge the routing tables of a service's gateways into a sample of its load.

    Args:
        tables: one table per gateway; None if at least one gateway did not answer.

    Returns:
        The sample; None if `tables` is None or empty.
    """
    if not tables:
        return None
    engines: dict[str, EngineLoad] = {}
    tables = list(tables)
    for table in tables:
        for engine in table["engines"]:
            stats = engine.get("stats")
            if engine["state"] == "serving" and stats is not None:
                engines[engine["uid"]] = EngineLoad(
                    kv_percent=100 * stats["pagesUsed"] / max(1, stats["pagesTotal"]),
                    waiting_tokens=stats["waitingTokens"],
                    requests=stats["running"] + stats["waiting"],
                )
    return Sample(
        engines=tuple(engines.values()),
        queued=sum(table["queued"] for table in tables),
        has_held_requests=any(table["waiting"] for table in tables),
        in_flight=sum(table["inFlight"] for table in tables),
        idle_seconds=min(table["idleSeconds"] for table in tables),
    )
