# SPDX-License-Identifier: Apache-2.0
"""Entry point of a reconcile: gets the service, parses it, and dispatches it to normal or degraded mode.

The controller calls `Reconciler.reconcile` for each key of its work queue, never concurrently for the same
key.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mizzen_operator.api import child_names, labels, reasons
from mizzen_operator.api.accelerator_profiles import ProfileConflictError, UnknownProfileError, apply_profile
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.parse import InvalidServiceError, parse_service
from mizzen_operator.api.types import InferenceService
from mizzen_operator.gateway.api_key_secrets import GatewayKey
from mizzen_operator.kube.errors import (
    BlockingReason,
    KubeError,
    Refused,
    describe_error,
    namespace_terminating,
)
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.kube.store import ObjectName
from mizzen_operator.reconciler.collaborators import Collaborators
from mizzen_operator.reconciler.context import ReconcileResult
from mizzen_operator.reconciler.degraded import DegradedReconciler
from mizzen_operator.reconciler.reconcile_service import ServiceReconciler
from mizzen_operator.status.degraded_status import read_invalid_service

logger = logging.getLogger(__name__)


class Reconciler:
    """Reconciles services: each call brings one service closer to its spec."""

    def __init__(self, collaborators: Collaborators) -> None:
        self._kube = collaborators.kube
        self._gateways = collaborators.gateways
        self._autoscaler = collaborators.autoscaler
        self._collaborators = collaborators
        self._profiles = collaborators.config.profiles()
        self._service_reconciler = ServiceReconciler(collaborators)
        self._degraded_reconciler = DegradedReconciler(collaborators)
        self._in_terminating_namespace: dict[ServiceKey, str] = {}
        """Uids of services whose namespace is being deleted."""

    def services_sharing_gateway(self, namespace: str) -> list[ServiceKey]:
        """Return the keys of known services that share the namespace's gateway."""
        return self._gateways.services_sharing(namespace)

    def invalidate(self, kind: str, name: ObjectName, object_labels: Mapping[str, str]) -> None:
        """Make the next reconcile apply a child again, because it was edited or deleted.

        Args:
            kind: the child's kind.
            name: the child's namespace and name.
            object_labels: the child's labels, which name its service unless it belongs to a shared gateway.
        """
        if service := object_labels.get(labels.SERVICE):
            key = ServiceKey(name.namespace, service)
            self._collaborators.apply_cache.invalidate(key, kind, name.name)
        else:
            self._gateways.invalidate(name.namespace, kind, name.name)

    async def services_with_changed_api_keys(self) -> list[ServiceKey]:
        """Return the keys of services whose gateway does not mount the right Secrets with API keys.

        Raises:
            KubeError: the API server failed.
        """
        return await self._gateways.services_with_changed_api_keys()

    async def reconcile(self, key: ServiceKey) -> ReconcileResult:
        """Reconcile one service.

        Raises:
            KubeError: the API server failed; the next reconcile will observe all objects again.
        """
        body = await self._kube.get(ObjectRef("InferenceService", key.namespace, key.name))
        if body is None:
            self._forget(key)
            return ReconcileResult(also_enqueue=self._gateways.remove_member(key))
        if "deletionTimestamp" in body["metadata"]:
            return await self._reconcile_deleting(key, body, _deleting())
        if self._in_terminating_namespace.get(key) == body["metadata"]["uid"]:
            return await self._reconcile_deleting(key, body, namespace_terminating())
        try:
            service = parse_service(body)
        except InvalidServiceError:
            # The store may contain the object as an older CRD converted it: no watch reports a new CRD.
            body = await self._kube.get_fresh(ObjectRef("InferenceService", key.namespace, key.name))
            if body is None:
                return ReconcileResult(requeue_backoff=True)  # the watch is about to report its deletion
            try:
                service = parse_service(body)
            except InvalidServiceError as error:
                failure = BlockingReason(reasons.INVALID_SPEC, str(error))
                return await self._reconcile_degraded(key, body, failure)
        failure: BlockingReason | None = None
        try:
            service = apply_profile(service, self._profiles)
        except (UnknownProfileError, ProfileConflictError) as error:
            unknown = isinstance(error, UnknownProfileError)
            failure = BlockingReason(reasons.PROFILE_MISSING if unknown else reasons.INVALID_SPEC, str(error))
            last = await self._restore_last_revision(service)
            if last is None:
                return await self._reconcile_degraded(key, body, failure)
            service = last
        try:
            result = await self._service_reconciler.reconcile(key, service, failure)
        except (KubeError, OSError):
            raise
        except Exception as error:
            logger.exception("%s/%s: unexpected error", *key)
            return await self._reconcile_degraded(key, body, _operator_error(error))
        return self._handle_terminating_namespace(key, service, result)

    async def _restore_last_revision(self, service: InferenceService) -> InferenceService | None:
        """Return a service with the engine's fields of the revision in its status; other fields stay.

        Returns None if the service has no revision yet, or if its ControllerRevision is lost or unreadable.

        Raises:
            KubeError: the API server failed.
        """
        revision = service.status.get("updateRevision", "")
        try:
            return await self._collaborators.revisions.restore(service, revision) if revision else None
        except Refused as error:
            logger.warning("%s/%s: %s", service.namespace, service.name, error)
            return None

    def _handle_terminating_namespace(
        self, key: ServiceKey, service: InferenceService, result: ReconcileResult
    ) -> ReconcileResult:
        """If a service's namespace is being deleted, treat the service as being deleted from now on.

        Return `result` unchanged for other services. For such a service, return a result that contains only
        `also_enqueue`.
        """
        if result.failure != namespace_terminating():
            return result
        logger.info("%s/%s: the namespace is being deleted; no more objects are created", *key)
        self._in_terminating_namespace[key] = service.uid
        return ReconcileResult(also_enqueue=result.also_enqueue)

    async def _reconcile_degraded(
        self, key: ServiceKey, body: Mapping[str, Any], failure: BlockingReason
    ) -> ReconcileResult:
        """Report the state of a service without changing it, because its spec cannot be applied."""
        self._autoscaler.observe_service(key, None)
        service = read_invalid_service(body)
        if service.shares_gateway:
            self._gateways.add_member(key)
        snapshot = await self._degraded_reconciler.reconcile(key, service, failure)
        return ReconcileResult(settled=snapshot.settled, failure=failure)

    async def _reconcile_deleting(
        self, key: ServiceKey, body: Mapping[str, Any], failure: BlockingReason
    ) -> ReconcileResult:
        """Report the remaining groups and gateway of a service that is being deleted.

        The garbage collector deletes its children.
        """
        self._autoscaler.observe_service(key, None)
        also_enqueue = self._gateways.remove_member(key)
        service = replace(read_invalid_service(body), deleting=True, wanted_groups=0)
        await self._degraded_reconciler.reconcile(key, service, failure)
        return ReconcileResult(also_enqueue=also_enqueue)

    def _forget(self, key: ServiceKey) -> None:
        """Drop everything cached about a deleted service."""
        collaborators = self._collaborators
        self._in_terminating_namespace.pop(key, None)
        self._service_reconciler.forget(key)
        collaborators.first_seen.forget(key)
        collaborators.apply_cache.forget(key)
        collaborators.revisions.forget(key)
        collaborators.api_key_secrets.forget(GatewayKey(key.namespace, child_names.gateway_name(key.name)))
        collaborators.status_writer.forget(key)
        collaborators.gateway_watch.forget(key)
        collaborators.verifier.retain(key, ())
        collaborators.autoscaler.observe_service(key, None)
        collaborators.model_fetcher.forget(key)


def _deleting() -> BlockingReason:
    return BlockingReason(
        reasons.DELETING,
        "the service is being deleted: existing pods serve until they are deleted, and no new ones are "
        "created; metadata.finalizers shows what the deletion waits for",
    )


def _operator_error(error: Exception) -> BlockingReason:
    return BlockingReason(
        reasons.OPERATOR_ERROR,
        f"the operator fails on this service and does not change it: {describe_error(error)}; the operator's "
        "log has the traceback. Go back to the previous spec or to the previous release of the operator, and "
        "report this as a bug",
    )
