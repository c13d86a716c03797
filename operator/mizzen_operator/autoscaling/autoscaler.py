"""Looks at autoscaled services every few seconds, and writes `spec.replicas` through `/scale`.

It is the only one that may: where a HorizontalPodAutoscaler has the service as its target too, nothing is
written, and the service's condition ScalingActive says so. It is looked for now and then, and before each
write.
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
from mizzen_operator.autoscaling.policy import EngineLoad, Memory, Sample, Scale, decide
from mizzen_operator.gateway_client.watch import GatewayWatch
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.objects import timestamp
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.metrics import Metrics

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 5.0
RIVALS_SECONDS = 60.0
"""How often it is seen whether somebody else scales a service that need not be scaled."""
AT_ONCE, ALL_AT_ONCE = 16, 64
"""Services of one namespace, and of all, that are decided on at once: some may wait for what hangs."""


@dataclass(slots=True)
class _Scaled:
    """What is known of one autoscaled service.

    Attributes:
        uid: which service of its name it is.
        scales: what was done, the latest last, as the status tells it.
    """

    uid: str = ""
    memory: Memory = field(default_factory=Memory)
    rival: str = ""
    """The HorizontalPodAutoscaler that scales it too."""
    looked_for_rivals: float = float("-inf")
    scales: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class Autoscaler:
    """All services with `spec.autoscaling`; looks at a service tell it which these are."""

    def __init__(
        self,
        kube: KubeClient,
        listener: GatewayWatch,
        metrics: Metrics,
        tell: Callable[[ServiceKey], None],
    ) -> None:
        """Scale by what gateways say; `tell` gets services whose status has to say something else."""
        self._kube = kube
        self._tell = tell
        self._listener = listener
        self._metrics = metrics
        self._services: dict[ServiceKey, _Scaled] = {}
        self._urgent: defaultdict[str, set[ServiceKey]] = defaultdict(set)
        """Services that are due, by their namespace."""
        self._deciding: set[str] = set()
        """Namespaces of which some are decided on now."""
        self._all = asyncio.Semaphore(ALL_AT_ONCE)
        self._wake = asyncio.Event()

    def seen(self, key: ServiceKey, settings: Autoscaling | None, uid: str = "") -> None:
        """Take what a look at a service of this uid saw."""
        if settings is None:
            self._services.pop(key, None)
        elif key not in self._services or self._services[key].uid != uid:
            self._services[key] = _Scaled(uid)

    def rival(self, key: ServiceKey) -> str:
        """Name of the HorizontalPodAutoscaler that keeps this one from scaling a service; empty without."""
        return self._services[key].rival if key in self._services else ""

    def scales(self, key: ServiceKey) -> Sequence[Mapping[str, Any]]:
        """What this process has done to a service, the latest last; see `status.scaleHistory`."""
        return tuple(self._services[key].scales) if key in self._services else ()

    def poke(self, key: ServiceKey) -> None:
        """Decide on a service now: its gateways have news, perhaps a request that waits."""
        if key in self._services and self._listener.holds_requests(key):
            self._urgent[key.namespace].add(key)
            self._wake.set()

    async def run(self) -> None:
        """Decide again and again, until cancelled."""
        due = time.monotonic() + PERIOD_SECONDS
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    async with asyncio.timeout(max(0.0, due - time.monotonic())):
                        await self._wake.wait()
                except TimeoutError:
                    due = time.monotonic() + PERIOD_SECONDS * random.uniform(0.9, 1.0)
                    for key in self._services:
                        self._urgent[key.namespace].add(key)
                self._wake.clear()
                for namespace in self._urgent.keys() - self._deciding:
                    self._deciding.add(namespace)
                    group.create_task(self._decide_all(namespace))

    async def _decide_all(self, namespace: str) -> None:
        """Decide on those of a namespace's services that are due: what is slow there holds up no other's."""
        turns = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(self._turn(key, turns) for key in self._urgent.pop(namespace)))
        self._deciding.discard(namespace)
        if namespace in self._urgent:
            self._wake.set()

    async def _turn(self, key: ServiceKey, turns: asyncio.Semaphore) -> None:
        async with turns, self._all:
            try:
                await self._decide(key)
            except KubeError as error:
                if error.code != 409:  # somebody changed the service meanwhile: the next turn sees it
                    logger.warning("%s/%s: cannot scale: %s", *key, error)
            except Exception:
                logger.exception("%s/%s: unexpected error", *key)

    async def _decide(self, key: ServiceKey) -> None:
        scaled = self._services.get(key)
        body = await self._kube.get(ObjectRef(labels.KIND, *key))
        if scaled is None or body is None or "deletionTimestamp" in body["metadata"]:
            self._services.pop(key, None)
            return
        try:
            service = parse_service(body)
        except InvalidServiceError:
            return  # the look at it says so
        if service.autoscaling is None or service.suspend:
            return
        if await self._has_rival(key, scaled):
            return
        now = time.monotonic()
        memory = scaled.memory
        if not memory.recommended:  # so it knows of no lull, and goes down no sooner than if there was none
            memory = replace(memory, recommended=((now, service.replicas),))
        sample = read(await self._listener.fetch_tables(key))
        scale, scaled.memory = decide(service.autoscaling, service.replicas, sample, memory, now)
        if scale is not None and not await self._has_rival(key, scaled, older_than=0.0):
            await self._write(key, scaled, scale, body["metadata"]["resourceVersion"])

    async def _write(self, key: ServiceKey, scaled: _Scaled, scale: Scale, version: str) -> None:
        patch = {"metadata": {"resourceVersion": version}, "spec": {"replicas": scale.after}}
        scaled.memory = replace(scaled.memory, recommended=())
        await self._kube.patch(ObjectRef(labels.KIND, *key, "scale"), patch)
        logger.info("%s/%s: from %d to %d groups (%s)", *key, scale.before, scale.after, scale.reason)
        self._metrics.actions.labels("Scale").inc()
        done = {"from": scale.before, "to": scale.after, "reason": scale.reason}
        scaled.scales.append({"time": timestamp(datetime.now(UTC)), **done})
        del scaled.scales[:-MAX_SCALE_HISTORY]
        self._tell(key)

    async def _has_rival(self, key: ServiceKey, scaled: _Scaled, older_than: float = RIVALS_SECONDS) -> bool:
        """Whether somebody else scales a service, by a look that is no older."""
        if time.monotonic() - scaled.looked_for_rivals > older_than:
            others = await self._kube.list(ObjectRef("HorizontalPodAutoscaler", key.namespace))
            before, scaled.rival = scaled.rival, rival(others, key.name)
            scaled.looked_for_rivals = time.monotonic()
            if scaled.rival != before:
                logger.warning("%s/%s: scaled by HorizontalPodAutoscaler %r too", *key, scaled.rival)
                self._tell(key)
        return bool(scaled.rival)


def rival(autoscalers: Iterable[Mapping[str, Any]], service: str) -> str:
    """Name of the first HorizontalPodAutoscaler whose target is a service; empty without."""
    for body in autoscalers:
        target = body["spec"]["scaleTargetRef"]
        if (target.get("kind"), target.get("name")) == (labels.KIND, service):
            return body["metadata"]["name"]
    return ""


def read(tables: Iterable[Mapping[str, Any]] | None) -> Sample | None:
    """What the routing tables of all gateways of a service say together; None when one is missing."""
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
        held=any(table["waiting"] for table in tables),
        in_flight=sum(table["inFlight"] for table in tables),
        idle_seconds=min(table["idleSeconds"] for table in tables),
    )
