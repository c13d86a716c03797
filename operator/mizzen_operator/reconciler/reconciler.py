"""Entry point of a reconcile: get the service, parse it, and dispatch to its reconciler.

The controller calls `Reconciler.reconcile` for each key of its work queue, at most once at a time per key.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mizzen_operator.api import child_names, labels, reasons
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.parse import InvalidServiceError, parse_service
from mizzen_operator.api.types import InferenceService
from mizzen_operator.gateway.api_key_secrets import GatewayKey
from mizzen_operator.kube.errors import BlockingReason, KubeError, describe_error, namespace_terminating
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.kube.store import ObjectName
from mizzen_operator.reconciler.collaborators import Collaborators
from mizzen_operator.reconciler.context import ReconcileResult
from mizzen_operator.reconciler.degraded import DegradedReconciler
from mizzen_operator.reconciler.reconcile_service import ServiceReconciler
from mizzen_operator.status.degraded_status import read_invalid_service

logger = logging.getLogger(__name__)


class Reconciler:
    """Brings services to what their specs ask for, one step per reconcile."""

    def __init__(self, collaborators: Collaborators) -> None:
        self._kube = collaborators.kube
        self._gateways = collaborators.gateways
        self._autoscaler = collaborators.autoscaler
        self._collaborators = collaborators
        self._service_reconciler = ServiceReconciler(collaborators)
        self._degraded_reconciler = DegradedReconciler(collaborators)
        self._in_terminating_namespace: dict[ServiceKey, str] = {}
        """Uids of services whose namespace is being deleted."""

    def services_sharing_gateway(self, namespace: str) -> list[ServiceKey]:
        """Return the reconciled services that share the namespace's gateway."""
        return self._gateways.services_sharing(namespace)

    def invalidate(self, kind: str, name: ObjectName, object_labels: Mapping[str, str]) -> None:
        """Compare a child with its manifest again at the next reconcile: it was edited or deleted.

        Args:
            kind: the child's kind.
            name: its namespace and name.
            object_labels: its labels, which name its service.
        """
        if service := object_labels.get(labels.SERVICE):
            key = ServiceKey(name.namespace, service)
            self._collaborators.apply_cache.invalidate(key, kind, name.name)
        else:
            self._gateways.invalidate(name.namespace, kind, name.name)

    async def services_with_changed_api_keys(self) -> list[ServiceKey]:
        """Return the services whose gateway mounts other Secrets with API keys than it should.

        Raises:
            KubeError: the API server failed.
        """
        return await self._gateways.services_with_changed_api_keys()

    async def reconcile(self, key: ServiceKey) -> ReconcileResult:
        """Reconcile one service.

        Raises:
            KubeError: the API server failed; the next reconcile starts from what it observes then.
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
            # The stored object may match an older CRD: no watch reports a change of the CRD.
            body = await self._kube.get_fresh(ObjectRef("InferenceService", key.namespace, key.name))
            if body is None:
                return ReconcileResult(requeue_backoff=True)  # its deletion is about to be reported
            try:
                service = parse_service(body)
            except InvalidServiceError as error:
                failure = BlockingReason(reasons.INVALID_SPEC, str(error))
                return await self._reconcile_degraded(key, body, failure)
        try:
            result = await self._service_reconciler.reconcile(key, service)
        except (KubeError, OSError):
            raise
        except Exception as error:
            logger.exception("%s/%s: unexpected error", *key)
            return await self._reconcile_degraded(key, body, _operator_error(error))
        return self._handle_terminating_namespace(key, service, result)

    def _handle_terminating_namespace(
        self, key: ServiceKey, service: InferenceService, result: ReconcileResult
    ) -> ReconcileResult:
        """Treat a service as being deleted from now on if its namespace is."""
        if result.failure != namespace_terminating():
            return result
        logger.info("%s/%s: the namespace is being deleted; nothing is created any more", *key)
        self._in_terminating_namespace[key] = service.uid
        return ReconcileResult(also_enqueue=result.also_enqueue)

    async def _reconcile_degraded(
        self, key: ServiceKey, body: Mapping[str, Any], failure: BlockingReason
    ) -> ReconcileResult:
        """Leave a service as it is, and report its state: its spec cannot be acted on."""
        self._autoscaler.observe_service(key, None)
        service = read_invalid_service(body)
        if service.shares_gateway:
            self._gateways.add_member(key)
        snapshot = await self._degraded_reconciler.reconcile(key, service, failure)
        return ReconcileResult(settled=snapshot.settled, failure=failure)

    async def _reconcile_deleting(
        self, key: ServiceKey, body: Mapping[str, Any], failure: BlockingReason
    ) -> ReconcileResult:
        """Report what is left of a service that is being deleted; its children are garbage-collected."""
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
        "the service is being deleted: what runs serves until it goes, and nothing is created any more; "
        "metadata.finalizers says what it waits for",
    )


def _operator_error(error: Exception) -> BlockingReason:
    return BlockingReason(
        reasons.OPERATOR_ERROR,
        "the operator fails on this service, and leaves it as it is: "
        f"{describe_error(error)}; its log has the traceback. Go back to the previous spec, or to the "
        "operator's previous release, and report it",
    )
