"""One look at one service: observe, plan, execute, status."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.parse import ApiError, parse
from mizzen_operator.api.types import InferenceService
from mizzen_operator.autoscaling.autoscaler import Autoscaler
from mizzen_operator.config import OperatorConfig
from mizzen_operator.gateway.api_key_secrets import LabelledSecrets, Where
from mizzen_operator.gateway.reconcile import Entrances
from mizzen_operator.gateway_client.watch import GatewayListener
from mizzen_operator.kube.apply import Applier
from mizzen_operator.kube.apply_cache import ApplyCache
from mizzen_operator.kube.client import Kube
from mizzen_operator.kube.errors import Failure, KubeError, brief, namespace_terminating
from mizzen_operator.kube.last_applied import Children
from mizzen_operator.kube.refs import Ref
from mizzen_operator.kube.store import ObjectName
from mizzen_operator.metrics import Metrics
from mizzen_operator.model_cache.fetch import ModelFetcher
from mizzen_operator.readiness.gates import ReadinessGates
from mizzen_operator.readiness.golden_prompts import Verifier
from mizzen_operator.reconciler.context import ReconcileResult
from mizzen_operator.reconciler.degraded import DegradedReconciler, read_invalid_service
from mizzen_operator.reconciler.reconcile_service import Steps
from mizzen_operator.rollout.executor import Executor
from mizzen_operator.rollout.pod_policies import PodPolicies
from mizzen_operator.rollout.revisions import Revisions
from mizzen_operator.status.service_metrics import ServiceMetrics
from mizzen_operator.status.writer import StatusWriter

logger = logging.getLogger(__name__)


class Reconciler:
    """Brings services to what their specs say, one step at a time."""

    def __init__(
        self,
        kube: Kube,
        gateways: GatewayListener,
        config: OperatorConfig,
        metrics: Metrics,
        autoscaler: Autoscaler,
        verifier: Verifier,
        children: Children,
        fleet: ServiceMetrics,
    ) -> None:
        self._autoscaler = autoscaler
        self._verifier = verifier
        self._gates = ReadinessGates(kube, verifier)
        self._bystander = DegradedReconciler(kube, gateways, self._gates)
        self._kube = kube
        self._gateways = gateways
        self._labelled = LabelledSecrets(kube, config.namespace)
        self._revisions = revisions = Revisions(kube, config, metrics)
        self._models = ModelFetcher(kube, config, metrics)
        applier = Applier(kube, metrics, children)
        self._applied = applied = ApplyCache(config)
        executor = Executor(
            kube, config, metrics=metrics, revisions=revisions, applier=applier, applied=applied
        )
        self._entrances = Entrances(
            kube,
            config,
            metrics=metrics,
            labelled=self._labelled,
            applier=applier,
            applied=applied,
            record_key_time=fleet.record_keys_created,
        )
        self._writer = StatusWriter(kube, metrics, fleet)
        self._ending: dict[ServiceKey, str] = {}
        """Uids of services whose namespace is being deleted."""
        self._steps = Steps(
            kube,
            config,
            gateways=gateways,
            gates=self._gates,
            revisions=revisions,
            models=self._models,
            executor=executor,
            policies=PodPolicies(config, applier, applied),
            applied=applied,
            entrances=self._entrances,
            writer=self._writer,
            autoscaler=autoscaler,
        )

    def services_sharing_gateway(self, namespace: str) -> list[ServiceKey]:
        """Services that share the namespace's gateway, as far as they were looked at."""
        return self._entrances.sharing(namespace)

    def invalidate(self, kind: str, name: ObjectName, given: Mapping[str, str]) -> None:
        """Compare a child of these labels anew at the next look: it was edited, or is gone."""
        if service := given.get(labels.SERVICE):
            self._applied.invalidate(ServiceKey(name.namespace, service), kind, name.name)
        else:
            self._entrances.doubt(name.namespace, kind, name.name)

    async def services_with_changed_api_keys(self) -> list[ServiceKey]:
        """Services whose gateway should mount other Secrets with API keys than it was seen to.

        Raises:
            KubeError: the API server failed.
        """
        return await self._entrances.other_api_keys()

    async def reconcile(self, key: ServiceKey) -> ReconcileResult:
        """Look at a service and do the next step.

        Raises:
            KubeError: the API server failed; nothing is lost, the next look starts anew.
        """
        body = await self._kube.get(Ref("InferenceService", key.namespace, key.name))
        if body is None:
            self._forget(key)
            return ReconcileResult(also_enqueue=self._entrances.leave(key))
        if "deletionTimestamp" in body["metadata"]:
            return await self._see_off(key, body, _deleting())
        if self._ending.get(key) == body["metadata"]["uid"]:
            return await self._see_off(key, body, namespace_terminating())
        try:
            service = parse(body)
        except ApiError:
            # It may be as the CRD before had it, for what is stored has not changed, and no watch tells.
            return await self._unreadable(key)
        try:
            return await self._step(key, service)
        except (KubeError, OSError):
            raise
        except Exception as error:
            logger.exception("%s/%s: unexpected error", *key)
            return await self._stand_by(key, body, _fault(error))

    async def _unreadable(self, key: ServiceKey) -> ReconcileResult:
        """Look at a service that could not be read as the API server has it now."""
        body = await self._kube.reread(Ref("InferenceService", key.namespace, key.name))
        if body is None:
            return ReconcileResult(requeue_backoff=True)  # its end is about to be told
        try:
            service = parse(body)
        except ApiError as error:
            return await self._stand_by(key, body, Failure("InvalidSpec", str(error)))
        return await self._step(key, service)

    async def _step(self, key: ServiceKey, service: InferenceService) -> ReconcileResult:
        """Do the next step; where the namespace takes nothing any more it was the last one."""
        outcome = await self._steps.step(key, service)
        if outcome.failure != namespace_terminating():
            return outcome
        logger.info("%s/%s: the namespace is being deleted: nothing is made any more", *key)
        self._ending[key] = service.uid
        return ReconcileResult(also_enqueue=outcome.also_enqueue)

    async def _stand_by(self, key: ServiceKey, body: Mapping[str, Any], failure: Failure) -> ReconcileResult:
        """Leave a service as it is, and tell how that is: its spec cannot be acted on."""
        self._autoscaler.seen(key, None)
        service = read_invalid_service(body)
        if service.shared:
            self._entrances.join(key)
        seen = await self._bystander.observe(key, service, failure)
        await self._writer.write_degraded(key, seen)
        return ReconcileResult(settled=seen.settled, failure=failure)

    async def _see_off(self, key: ServiceKey, body: Mapping[str, Any], why: Failure) -> ReconcileResult:
        """Tell what is left of a service that is being deleted: its children go with it, nothing is made."""
        self._autoscaler.seen(key, None)
        others = self._entrances.leave(key)
        service = replace(read_invalid_service(body), deleting=True, wanted=0)
        seen = await self._bystander.observe(key, service, why)
        await self._writer.write_degraded(key, seen)
        return ReconcileResult(also_enqueue=others)

    def _forget(self, key: ServiceKey) -> None:
        self._ending.pop(key, None)
        self._steps.forget(key)
        self._applied.forget(key)
        self._revisions.forget(key)
        self._labelled.forget(Where(key.namespace, child_names.gateway_name(key.name)))
        self._writer.forget(key)
        self._gateways.forget(key)
        self._verifier.retain(key, ())
        self._autoscaler.seen(key, None)
        self._models.reported_download(key, None)


def _deleting() -> Failure:
    return Failure(
        "Deleting",
        "the service is being deleted: what runs serves until it goes, and nothing is made any more; "
        "metadata.finalizers says what it waits for",
    )


def _fault(error: Exception) -> Failure:
    """The operator's own fault, as far as a status can tell."""
    return Failure(
        "OperatorError",
        f"the operator fails on this service, and leaves it as it is: {brief(error)}; its log tells where. "
        "Go back to the spec before, or to the operator's release before, and report it",
    )
