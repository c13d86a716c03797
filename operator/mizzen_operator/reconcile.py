"""One look at one service: observe, plan, execute, status."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from mizzen_operator import labels, status
from mizzen_operator.api import ApiError, InferenceService, parse
from mizzen_operator.config import OperatorConfig
from mizzen_operator.execute import Executor, Refused
from mizzen_operator.gateways import Acknowledgements, GatewayClient
from mizzen_operator.kube import STRATEGIC, Kube, KubeError, Ref
from mizzen_operator.metrics import Metrics
from mizzen_operator.observe import GatewayPod, Group, Observed, observe
from mizzen_operator.plan import Wanted, plan
from mizzen_operator.queue import Key
from mizzen_operator.render.engine import engine_image, revision

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a look ended with.

    Attributes:
        waits: something is under way that no watch will tell of, such as a gateway's acknowledgement.
        settled: everything that is there runs; otherwise it may lack something that no watch tells of.
        failure: what kept the operator from its work; it tries again, ever more slowly.
    """

    waits: bool = False
    settled: bool = True
    failure: status.Failure | None = None


@dataclass(frozen=True, slots=True)
class _Heard:
    """What the gateways of a service said when they were asked last, and how to ask them again."""

    gateways: Sequence[GatewayPod]
    token: str
    answer: Acknowledgements


class Reconciler:
    """Brings services to what their specs say, one step at a time."""

    def __init__(self, kube: Kube, gateways: GatewayClient, config: OperatorConfig, metrics: Metrics) -> None:
        self._kube = kube
        self._gateways = gateways
        self._config = config
        self._metrics = metrics
        self._executor = Executor(kube, config, metrics)
        self._true: dict[Key, frozenset[str]] = {}
        self._heard: dict[Key, _Heard] = {}

    def heard(self) -> list[Key]:
        """Services whose gateways have something to route to."""
        return list(self._heard)

    async def hears_news(self, key: Key) -> bool:
        """Ask a service's gateways alone; tell whether they route otherwise than at the last look."""
        before = self._heard.get(key)
        if before is None:
            return False
        now = await self._gateways.ask(before.gateways, before.token)
        return (now.by_all, now.by_some) != (before.answer.by_all, before.answer.by_some)

    async def reconcile(self, key: Key) -> Outcome:
        """Look at a service and do the next step.

        Raises:
            KubeError: the API server failed; nothing is lost, the next look starts anew.
        """
        body = await self._kube.get(Ref("InferenceService", key.namespace, key.name))
        if body is None:
            self._forget(key)
            return Outcome()
        if "deletionTimestamp" in body["metadata"]:
            return Outcome()  # its children go with it; nothing is made any more
        try:
            service = parse(body)
        except ApiError as error:
            logger.error("%s/%s: %s", key.namespace, key.name, error)
            return Outcome(failure=status.Failure("WrongCRD", str(error)))
        return await self._step(key, service)

    def _forget(self, key: Key) -> None:
        self._executor.forget(key)
        self._count(key, frozenset())
        self._true.pop(key, None)
        self._heard.pop(key, None)

    async def _step(self, key: Key, service: InferenceService) -> Outcome:
        observed = await observe(self._kube, service)
        wanted = Wanted(service.name, service.groups, revision(service, self._config))
        acknowledged, groups = Acknowledgements(), observed.groups
        deployment: Mapping[str, Any] = observed.deployment or {}
        failure: status.Failure | None = None
        self._executor.refresh(service, settled=observed.settled)
        try:
            token = await self._executor.keys(service)
            deployment = await self._executor.gateway(service, observed)
            acknowledged = await self._ask(key, observed, token)
            if acknowledged.refused:
                failure = _refused(service)
            groups = await self._gates(service, observed, acknowledged)
            actions = plan(wanted, groups, acknowledged.by_all, observed.taken)
            await self._executor.groups(service, actions)
        except Refused as error:
            failure = status.Failure(error.reason, str(error))
        except KubeError as error:
            if error.code not in (400, 403, 422):
                raise
            failure = status.Failure("Rejected", f"the API server rejects a change: {error}")
        facts = status.Facts(
            service,
            wanted.revision,
            engine_image(service, self._config),
            groups,
            observed.gateways,
            deployment,
            failure,
        )
        await self._write(key, facts)
        unheard = any(
            group.live and group.containers_ready and group.uid not in acknowledged.by_all for group in groups
        )
        resting = any(group.resting for group in groups)
        waits = (unheard and acknowledged.asked > 0) or resting
        return Outcome(waits=waits, settled=observed.settled, failure=failure)

    async def _ask(self, key: Key, observed: Observed, token: str) -> Acknowledgements:
        if not any(group.live and group.containers_ready for group in observed.groups):
            self._heard.pop(key, None)
            return Acknowledgements()
        answer = await self._gateways.ask(observed.gateways, token)
        self._heard[key] = _Heard(observed.gateways, token, answer)
        if answer.refused:
            self._executor.forget(key)  # the token may have been made anew
        return answer

    async def _gates(
        self, service: InferenceService, observed: Observed, acknowledged: Acknowledgements
    ) -> tuple[Group, ...]:
        """Write the readiness gates that changed; returns the groups as they are then."""
        groups: list[Group] = []
        for group in observed.groups:
            verdict = _gate(group, acknowledged)
            if verdict is not None:
                value, reason = verdict
                await self._write_gate(service, group, value, reason)
                group = replace(group, routable=value, was_routable=True)
            groups.append(group)
        return tuple(groups)

    async def _write_gate(self, service: InferenceService, group: Group, value: bool, reason: str) -> None:
        condition = {
            "type": labels.ROUTABLE,
            "status": "True" if value else "False",
            "reason": reason,
            "lastTransitionTime": status.timestamp(datetime.now(UTC)),
        }
        patch = {"metadata": {"uid": group.uid}, "status": {"conditions": [condition]}}
        ref = Ref("Pod", service.namespace, group.name, "status")
        try:
            await self._kube.patch(ref, patch, STRATEGIC)
        except KubeError as error:
            if error.code not in (404, 409):
                raise

    async def _write(self, key: Key, facts: status.Facts) -> None:
        service = facts.service
        new = status.build(facts, datetime.now(UTC))
        self._count(key, frozenset(c["type"] for c in new["conditions"] if c["status"] == "True"))
        if new == service.status:
            return
        manifest = {
            "apiVersion": labels.API_VERSION,
            "kind": labels.KIND,
            "metadata": {"name": service.name, "namespace": service.namespace, "uid": service.uid},
            "status": new,
        }
        try:
            await self._kube.apply(manifest, "status")
        except KubeError as error:
            if error.code not in (404, 409):
                raise

    def _count(self, key: Key, true: frozenset[str]) -> None:
        before = self._true.get(key, frozenset())
        for name in true - before:
            self._metrics.services.labels(name).inc()
        for name in before - true:
            self._metrics.services.labels(name).dec()
        self._true[key] = true


def _refused(service: InferenceService) -> status.Failure:
    return status.Failure(
        "TokenRefused",
        f"a gateway holds another token than Secret {labels.root_keys(service.name)}, which was made anew: "
        f"kubectl delete pods -l {labels.SERVICE}={service.name} has all pods start with the new keys",
    )


def _gate(group: Group, acknowledged: Acknowledgements) -> tuple[bool, str] | None:
    """The gate's new value and why, or None when it stays.

    It opens when every ready gateway routes to the group. It closes when the engine is not ready, or when no
    gateway that answers routes to it: a gateway that has only just started must not close what others use.
    """
    if not group.live:
        return None
    if group.routable:
        if not group.containers_ready:
            return False, "EngineNotReady"
        if acknowledged.answered and group.uid not in acknowledged.by_some:
            return False, "NoGatewayRoutes"
        return None
    if group.containers_ready and group.uid in acknowledged.by_all:
        return True, "GatewaysRoute"
    return None
