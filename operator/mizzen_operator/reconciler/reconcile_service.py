# SPDX-License-Identifier: Apache-2.0
"""Reconciles one InferenceService whose spec is valid; `reconciler.py` calls it.

A reconcile consists of ten steps, from observing the objects to writing the status.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from mizzen_operator.api import reasons
from mizzen_operator.api.gpu_memory_check import MemoryCheck, check_gpu_memory
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.types import InferenceService
from mizzen_operator.gateway.reconcile import ReconciledGateway, token_refused_reason
from mizzen_operator.gateway_client.routing_table import RoutingState
from mizzen_operator.kube.errors import BlockingReason, KubeError, Refused, describe_error, rejection
from mizzen_operator.kube.objects import is_condition_true
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.model_cache.fetch import POLL_SECONDS
from mizzen_operator.model_cache.progress import (
    Download,
    allowed_actions,
    load_finished_download,
    new_download,
    pause_during_download,
    pin_revision,
    restart_progress_clock,
)
from mizzen_operator.pods.cold_start import cold_start_entry
from mizzen_operator.pods.group import Group
from mizzen_operator.pods.observe import observe
from mizzen_operator.reconciler.collaborators import Collaborators
from mizzen_operator.reconciler.context import (
    PreviousResult,
    ReconcileContext,
    ReconcileResult,
    report_meanwhile,
)
from mizzen_operator.reconciler.waiting_pods import explain_waiting_pods
from mizzen_operator.resources import revision_hash
from mizzen_operator.rollout import progress
from mizzen_operator.rollout.actions import Action, DeleteGroup, delete_mislabelled_pods, drop_creations
from mizzen_operator.rollout.avoided_nodes import end_needless_waits, find_avoided_nodes
from mizzen_operator.rollout.planner import plan
from mizzen_operator.rollout.state import load_state
from mizzen_operator.status.inputs import StatusInputs

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


class ServiceReconciler:
    """Reconciles services whose specs are valid."""

    def __init__(self, collaborators: Collaborators) -> None:
        self._collaborators = collaborators
        self._previous: dict[ServiceKey, PreviousResult] = {}

    def forget(self, key: ServiceKey) -> None:
        """Drop everything cached about a deleted service."""
        self._previous.pop(key, None)
        self._collaborators.dry_run.forget(key)

    async def reconcile(
        self, key: ServiceKey, service: InferenceService, failure: BlockingReason | None = None
    ) -> ReconcileResult:
        """Bring a service one step closer to its spec, and write its status.

        Args:
            key: the service's key.
            service: the service, with the values of its accelerator profile.
            failure: why `service` has an earlier spec than the API server's; None if it has the current one.

        Raises:
            KubeError: the API server failed; steps that do not depend on the failed request have been done.
        """
        collaborators = self._collaborators
        # 1. Observe: read the service's objects, and load the rollout state from its status.
        observed = await observe(collaborators.kube, service, collaborators.first_seen)
        collaborators.autoscaler.observe_service(key, service.autoscaling, service.uid)
        finished = load_finished_download(service)
        context = ReconcileContext(
            service=service,
            observed=observed,
            revision=revision_hash.revision(service, collaborators.config),
            now=datetime.now(UTC),
            rollout=load_state(service.status),
            groups=observed.groups,
            memory_fit=_check_memory(service, finished),
            download=finished,
            failure=failure,
        )
        previous = self._previous.get(key, PreviousResult())
        if collaborators.apply_cache.expire(service, observed.progress_marker, settled=observed.settled):
            collaborators.revisions.forget(key)
        async with report_meanwhile(partial(self._report, key, context, previous)):
            # 2. Policies: apply the NetworkPolicies and the PodDisruptionBudget before any pod exists.
            with context.attempt():
                await collaborators.pod_policies.apply_network_policies(context.service)
            with context.attempt():
                await collaborators.pod_policies.apply_disruption_budget(context.service)
            with context.attempt():
                # 3. Keys and gateway: create or update the Secrets and the gateway.
                gateway = context.gateway = await collaborators.gateways.reconcile(key, service, observed)
                context.record_failure(gateway.failure)
                # 4. Routes: ask the gateways which groups they route to.
                routing = context.routing = await self._query_gateways(key, context, gateway)
                # 5. Readiness gates: write the gates that change because of the routes or of verdicts.
                context.groups = await collaborators.readiness_gates.update_routable(
                    service, observed.groups, routing
                )
                context.cold_start = _cold_start(observed.groups, context.groups)
                context.groups = await collaborators.readiness_gates.update_verified(
                    service, context.revision, context.groups, routing
                )
                # 6. Keys: drop the old generation once no pod uses it.
                context.rotation = await collaborators.gateways.advance_rotation(
                    service, gateway, context.groups, routing
                )
                # 7. Model: fetch the model into its cache.
                download = await self._fetch_model(context, service)
                # 8. Plan: update the rollout's state, and decide which groups to create and delete.
                context.rollout = restart_progress_clock(
                    progress.update_state(
                        service, context.revision, context.groups, routing.routed_by_all, context.now
                    ),
                    download,
                    context.now,
                )
                context.download, context.restarts_counted = download, True
                context.memory_fit = _check_memory(service, download)
                actions = await self._plan(context, service)
                # 9. Execute: write new failures to the status before the failed pods are deleted; then act.
                if any(isinstance(action, DeleteGroup) for action in actions):
                    async with context.status_lock:
                        service = context.service = await collaborators.status_writer.write_failures(
                            context.service, context.rollout
                        )
                await collaborators.executor.execute(
                    pin_revision(service, download),
                    context.revision,
                    actions,
                    find_avoided_nodes(context.rollout.failures),
                )
            with context.attempt():
                await explain_waiting_pods(collaborators.kube, context)
        # 10. Status: write the status. After an error, values of the previous reconcile replace missing ones.
        final = context if context.error is None else context.with_previous(previous)
        if context.error is None or final.gateway is not None:
            await self._write_status(key, final)
        self._previous[key] = final.to_previous_result()
        if context.error is not None:
            raise context.error
        return self._result(key, context)

    async def _query_gateways(
        self, key: ServiceKey, context: ReconcileContext, gateway: ReconciledGateway
    ) -> RoutingState:
        """Return the routing state of the gateways; an empty one if no step depends on it."""
        service, observed = context.service, context.observed
        any_ready = any(group.live and group.containers_ready for group in observed.groups)
        autoscaled = service.autoscaling is not None and not service.suspend
        if not (any_ready or gateway.rotating or autoscaled):
            self._collaborators.gateway_watch.forget(key)
            return RoutingState()
        routing = await self._collaborators.gateway_watch.routing_state(observed.gateways, gateway.token, key)
        if routing.token_refused:  # the Secret with the token may have been recreated
            self._collaborators.gateways.forget_keys(key)
            context.record_failure(token_refused_reason(service))
        if observed.gateway_rollout_complete:
            return routing
        # Gateway pods of the new template may speak the same protocol as the engines.
        return replace(routing, protocol_mismatches=frozenset())

    async def _fetch_model(self, context: ReconcileContext, service: InferenceService) -> Download | None:
        """Return the progress of the model's download, or None if the model is not fetched.

        If the API server rejects an object of the fetch, the error is recorded, and the reconcile continues.
        """
        try:
            unused = not context.observed.groups
            return await self._collaborators.model_fetcher.sync(service, unused=unused)
        except (Refused, KubeError) as error:
            failure = rejection(error)
            if failure is None or not service.access.cached:
                raise
            context.record_failure(failure)
            return new_download(service, error=failure.message)

    async def _plan(self, context: ReconcileContext, service: InferenceService) -> list[Action]:
        """Record the revision, dry-run its pods, and return the planned actions."""
        collaborators, revision, state = self._collaborators, context.revision, context.rollout
        used = {state.stable_revision, *(group.revision for group in context.groups)}
        recorded = await collaborators.revisions.sync(service, revision, used)
        rejected = await self._dry_run(context)
        context.record_failure(rejected)
        target = progress.build_target(
            context.service, revision, state, restorable=state.stable_revision in recorded
        )
        target = pause_during_download(target, context.download)
        fits = context.memory_fit is None or context.memory_fit.fits
        can_start = rejected is None and fits
        if not can_start:  # neither create groups of the revision nor delete others to make room for them
            target = replace(target, paused=True)
        taken_names = context.observed.taken_names | collaborators.executor.foreign_pod_names(context.service)
        groups = end_needless_waits(context.groups, find_avoided_nodes(state.failures))
        actions = plan(target, groups, context.routing.routed_by_all, taken_names)
        if not can_start:
            actions = drop_creations(actions, revision)
        return [
            *delete_mislabelled_pods(context.observed.mislabelled_pods),
            *allowed_actions(actions, revision, context.download),
        ]

    async def _dry_run(self, context: ReconcileContext) -> BlockingReason | None:
        """Return the reason why groups of the revision cannot be created.

        Returns None if the dry run found no fault, or if a group of the revision exists or has existed.
        """
        existing = {group.revision for group in context.groups}
        if context.revision in existing or context.revision == context.rollout.stable_revision:
            return None
        service = pin_revision(context.service, context.download)
        return await self._collaborators.dry_run.check(service, context.revision)

    async def _report(self, key: ServiceKey, context: ReconcileContext, previous: PreviousResult) -> None:
        """Write the current state to the status while a reconcile waits for the API server or a rate limit.

        Nothing is written unless the status says Available, because only this statement must not become
        stale.
        """
        if not is_condition_true(context.service.status, reasons.AVAILABLE):
            return
        kube = self._collaborators.kube
        try:
            async with context.status_lock:
                body = await kube.get(ObjectRef("InferenceService", key.namespace, key.name))
                report = context.with_previous(previous)
                if report.gateway is None or body is None or body["metadata"]["uid"] != context.service.uid:
                    return
                context.service = replace(context.service, status=body.get("status", {}))
                observed = await observe(kube, context.service, self._collaborators.first_seen)
                report = replace(
                    report,
                    service=context.service,
                    observed=observed,
                    groups=observed.groups,
                    rollout=load_state(context.service.status),
                    restarts_counted=False,
                )
                await self._write_status(key, report)
        except KubeError as error:  # the reconcile does not depend on this report
            logger.warning("%s/%s: cannot report the current state: %s", *key, describe_error(error))

    async def _write_status(self, key: ServiceKey, context: ReconcileContext) -> None:
        collaborators, service, gateway = self._collaborators, context.service, context.gateway
        overdue = not context.downloading and progress.is_overdue(service, context.rollout, context.now)
        shared = gateway.shared if gateway is not None else None
        inputs = StatusInputs(
            service=service,
            revision=context.revision,
            engine_image=revision_hash.engine_image(service, collaborators.config),
            groups=context.groups,
            gateways=[
                replace(pod, responsive=pod.address not in context.routing.hung)
                for pod in context.observed.gateways
            ],
            deployment=context.deployment,
            failure=context.failure,
            sharing=shared.sharing if shared is not None else None,
            rollout=context.rollout,
            overdue=overdue,
            scale_history=collaborators.autoscaler.scale_history(key),
            competing_hpa=collaborators.autoscaler.competing_hpa(key),
            keys=gateway.keys if gateway is not None else None,
            rotation=context.rotation,
            memory_fit=context.memory_fit,
            download=collaborators.model_fetcher.reported_download(key, context.download),
            cold_start=context.cold_start,
            api_keys=context.routing.api_keys,
            missing_refs=context.missing_refs,
            volume_wait=context.volume_wait,
            quantization=find_model_property(context, context.routing.quantizations, "quantization") or "",
            task=find_model_property(context, context.routing.tasks, "task") or "",
            expert_groups=find_model_property(context, context.routing.expert_groups, "expert") or 0,
            images=find_model_property(context, context.routing.images, "images") or False,
        )
        await collaborators.status_writer.write(key, inputs, restarts_counted=context.restarts_counted)

    def _result(self, key: ServiceKey, context: ReconcileContext) -> ReconcileResult:
        backing_off = any(group.backing_off for group in context.groups)
        waits = (
            progress.seconds_to_deadline(context.service, context.rollout, context.now),
            progress.seconds_to_retry(context.rollout, context.now),
        )
        requeue_after = min((left + 1 for left in waits if left is not None and left > 0), default=None)
        if context.downloading and not context.service.suspend:
            requeue_after = POLL_SECONDS if context.failure is None else None
        return ReconcileResult(
            requeue_backoff=context.rotation is not None or backing_off,
            settled=context.observed.settled,
            failure=context.failure,
            also_enqueue=self._collaborators.gateways.affected_services(key, context.gateway),
            requeue_after=requeue_after,
        )


def _cold_start(before: Sequence[Group], after: Sequence[Group]) -> Mapping[str, Any]:
    """Return `status.coldStart` of the slowest group that has just become routable; empty if no group has.

    Args:
        before: the groups as observed.
        after: the groups after their readiness gates were written.
    """
    routable = {group.uid for group in before if group.was_routable}
    started = [group for group in after if group.was_routable and group.uid not in routable]
    entries = [cold_start_entry(group.name, group.startup, datetime.now(UTC)) for group in started]
    return max(entries, key=lambda entry: entry["firstReadySeconds"], default={})


def find_model_property(context: ReconcileContext, reported: Mapping[str, Value], name: str) -> Value | None:
    """Return a property of the model of the spec's revision; None if the gateways report none.

    While no gateway routes to a group of this revision, the value in the status stays.

    Args:
        context: the state of the service.
        reported: the property's values that gateways report, by the uid of the pod.
        name: name of the property in `status.model`.
    """
    routed = [
        group.uid
        for group in context.groups
        if group.revision == context.revision and group.uid in context.routing.routed_by_some
    ]
    if routed:
        return next(filter(None, map(reported.get, routed)), None)
    status = context.service.status
    unchanged = status.get("updateRevision") == context.revision
    return status.get("model", {}).get(name) if unchanged else None


def _check_memory(service: InferenceService, download: Download | None) -> MemoryCheck | None:
    """Check whether the model can fit, with the sizes of the fetched model if they are known."""
    if download is None:
        return check_gpu_memory(service)
    return check_gpu_memory(service, download.parameters, download.dtype, download.weight_bytes)
