# SPDX-License-Identifier: Apache-2.0
"""Degraded mode: the spec of a service is not applied; only its readiness gates and its status are written.

It applies if the spec was stored under another release's CRD and cannot be parsed, if the operator fails on
it, or if the service is being deleted. Existing groups and gateways continue to serve unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.gateway_client.routing_table import RoutingState
from mizzen_operator.kube.errors import BlockingReason
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.pods.observe import GatewayPod, observe
from mizzen_operator.reconciler.collaborators import Collaborators
from mizzen_operator.resources.secret_data import read_value
from mizzen_operator.status.degraded_status import DegradedSnapshot, InvalidService


class DegradedReconciler:
    """Reconciles services in degraded mode."""

    def __init__(self, collaborators: Collaborators) -> None:
        self._kube = collaborators.kube
        self._first_seen = collaborators.first_seen
        self._gateway_watch = collaborators.gateway_watch
        self._readiness_gates = collaborators.readiness_gates
        self._status_writer = collaborators.status_writer

    async def reconcile(
        self, key: ServiceKey, service: InvalidService, failure: BlockingReason
    ) -> DegradedSnapshot:
        """Write the readiness gates and the status of a service; return the observed state.

        Args:
            key: the service's key.
            service: the service.
            failure: reason why its spec is not applied.

        Raises:
            KubeError: the API server failed.
        """
        observed = await observe(self._kube, service, self._first_seen)
        routing = await self._query_gateways(key, service, observed.gateways)
        snapshot = DegradedSnapshot(
            service=service,
            failure=failure,
            groups=await self._readiness_gates.update_routable(service, observed.groups, routing),
            gateways=[replace(pod, responsive=pod.address not in routing.hung) for pod in observed.gateways],
            deployment=observed.deployment or {},
            settled=observed.settled,
        )
        await self._status_writer.write_degraded(key, snapshot)
        return snapshot

    async def _query_gateways(
        self, key: ServiceKey, service: InvalidService, gateways: Sequence[GatewayPod]
    ) -> RoutingState:
        name = (
            child_names.SHARED_GATEWAY
            if service.shares_gateway
            else child_names.root_keys_secret(service.name)
        )
        secret = await self._kube.get(ObjectRef("Secret", service.namespace, name))
        try:
            token = read_value(secret or {"data": {}, "metadata": {"name": name}}, labels.ADMIN_TOKEN)
        except ValueError:  # without the token, gateways do not report their routes
            self._gateway_watch.forget(key)
            return RoutingState()
        return await self._gateway_watch.routing_state(gateways, token, key)
