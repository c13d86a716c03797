# SPDX-License-Identifier: Apache-2.0
"""Reconciles a service's gateway, dedicated or shared, and advances the rotation of its keys.

Each reconcile of a service calls this module before it handles the groups; the module then calls
`dedicated.py` or `shared.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mizzen_operator.api import child_names, labels, reasons
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.gateway.api_key_secrets import ApiKeySecrets, GatewayKey
from mizzen_operator.gateway.dedicated import DedicatedGateways
from mizzen_operator.gateway.shared import SharedGateways
from mizzen_operator.gateway.shared_readonly import SharedGateway
from mizzen_operator.gateway_client.routing_table import RoutingState
from mizzen_operator.keys.key_cache import KeyCache
from mizzen_operator.keys.rotation import KeyRotator, RotationProgress, ServiceKeys, rotation_progress
from mizzen_operator.kube.apply import Applier
from mizzen_operator.kube.apply_cache import ApplyCache
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import BlockingReason, KubeError, Refused, rejection
from mizzen_operator.kube.objects import is_owned_by
from mizzen_operator.metrics import Metrics
from mizzen_operator.pods.group import Group
from mizzen_operator.pods.observe import ObservedState


@dataclass(frozen=True, slots=True)
class ReconciledGateway:
    """A service's gateway after its reconcile.

    Attributes:
        token: token of its admin API.
        deployment: live Deployment.
        keys: keys of the service.
        shared: the shared gateway; None if the gateway is dedicated.
        failure: why the spec could not be applied to the gateway, which then serves as before; None if the
            spec was applied.
    """

    token: str
    deployment: Mapping[str, Any]
    keys: ServiceKeys
    shared: SharedGateway | None = None
    failure: BlockingReason | None = None

    @property
    def rotating(self) -> bool:
        """Whether keys of the service or of its shared gateway have a next generation."""
        return self.keys.rotating or (self.shared is not None and len(self.shared.public_keys) > 1)


class GatewayReconciler:
    """Reconciles the gateways of all services."""

    def __init__(
        self,
        kube: KubeClient,
        config: OperatorConfig,
        *,
        metrics: Metrics,
        api_key_secrets: ApiKeySecrets,
        applier: Applier,
        applied: ApplyCache,
        record_key_time: Callable[[ServiceKey, str], None],
    ) -> None:
        self._keys = KeyCache(KeyRotator(kube, config, metrics, record_key_time), applied)
        self._dedicated = DedicatedGateways(config, api_key_secrets, applier, applied)
        self._applied = applied
        self._api_key_secrets = api_key_secrets
        self._shared_gateways = SharedGateways(kube, config, metrics, api_key_secrets, applier)
        self._members: set[ServiceKey] = set()
        self._dedicated_services: dict[GatewayKey, ServiceKey] = {}
        """Services by their dedicated gateway, if the gateway finds its API keys by label."""

    def services_sharing(self, namespace: str) -> list[ServiceKey]:
        """Return the services that share a namespace's gateway and that this process has reconciled."""
        return [key for key in self._members if key.namespace == namespace]

    async def services_with_changed_api_keys(self) -> list[ServiceKey]:
        """Return the services whose gateway mounts an outdated set of Secrets with API keys.

        Raises:
            KubeError: the API server failed.
        """
        keys: list[ServiceKey] = []
        for namespace, gateway in await self._api_key_secrets.changed_gateways():
            if gateway == child_names.SHARED_GATEWAY:
                keys += self.services_sharing(namespace)
            elif (key := self._dedicated_services.get(GatewayKey(namespace, gateway))) is not None:
                keys.append(key)
        return keys

    async def reconcile(
        self, key: ServiceKey, service: InferenceService, observed: ObservedState
    ) -> ReconciledGateway:
        """Apply the service's keys and gateway.

        If the cluster rejects a change of an existing gateway, the result reports it as a failure. The groups
        are reconciled all the same, because the gateway still serves and failed groups have to be replaced.

        Raises:
            Refused: the service's keys, or a gateway that does not exist yet, cannot be created; for example,
                because something else has a name that they need.
            KubeError: the API server failed, or rejected a gateway that does not exist yet.
        """
        if service.shares_gateway:
            return await self._shared(key, service, observed)
        gateway_key = GatewayKey(key.namespace, child_names.gateway_name(service.name))
        if service.gateway.keys_from_label:
            self._dedicated_services[gateway_key] = key
        else:
            self._dedicated_services.pop(gateway_key, None)
        keys = await self._keys.sync(service)
        try:
            return ReconciledGateway(keys.token, await self._dedicated.apply(service, observed), keys)
        except (Refused, KubeError) as error:
            failure, live = rejection(error), observed.deployment
            if failure is None or live is None or not is_owned_by(live, service.uid):
                raise
            return ReconciledGateway(keys.token, live, keys, failure=failure)

    async def _shared(
        self, key: ServiceKey, service: InferenceService, observed: ObservedState
    ) -> ReconciledGateway:
        self._members.add(key)
        self._shared_gateways.expire(service.namespace, settled=observed.settled)
        endpoint = observed.gateway_service
        shared = await self._shared_gateways.sync(service.namespace, observed.deployment, endpoint)
        if shared is None:
            message = f"{service.name} is no longer among the services of its namespace"
            raise KubeError(0, reasons.VANISHED, message)
        keys = await self._keys.sync(service, shared.public_keys)
        if self._shared_gateways.record_engine_keys(service, keys.engine):
            again = await self._shared_gateways.sync(service.namespace, shared.deployment, endpoint)
            shared = replace(again, changed=True) if again is not None else shared
        failure = shared.failure_for(service.name)
        return ReconciledGateway(shared.token, shared.deployment, keys, shared, failure)

    async def advance_rotation(
        self,
        service: InferenceService,
        gateway: ReconciledGateway,
        groups: Sequence[Group],
        routing: RoutingState,
    ) -> RotationProgress | None:
        """Drop the previous keys once nothing uses them; return the progress, or None if no rotation runs.

        Raises:
            Refused: a Secret with a name that the service needs belongs to something else.
            KubeError: the API server failed.
        """
        if not gateway.rotating:
            return None
        progress = rotation_progress(gateway.keys, groups, routing)
        if not progress.waiting_for:
            if gateway.keys.rotating:
                await self._keys.drop_previous(service)
            if gateway.shared is not None and self._shared_gateways.confirm_rotation(
                service, gateway.shared.public_keys[-1]
            ):
                self._shared_gateways.forget(service.namespace)
        return progress

    def affected_services(self, key: ServiceKey, gateway: ReconciledGateway | None) -> tuple[ServiceKey, ...]:
        """Return the other services of the shared gateway, if this reconcile has changed it; otherwise ()."""
        if gateway is None or gateway.shared is None or not gateway.shared.changed:
            return ()
        return tuple(other for other in self.services_sharing(key.namespace) if other != key)

    def add_member(self, key: ServiceKey) -> None:
        """Record that a service uses the shared gateway, and is to be reconciled when the gateway changes."""
        self._members.add(key)

    def remove_member(self, key: ServiceKey) -> tuple[ServiceKey, ...]:
        """Record that a service no longer uses the shared gateway.

        Returns:
            The services that still use it; empty if the service did not use it before.
        """
        if key not in self._members:
            return ()
        self._members.discard(key)
        others = self.services_sharing(key.namespace)
        if not others:
            self._api_key_secrets.forget(GatewayKey(key.namespace, child_names.SHARED_GATEWAY))
            self._shared_gateways.drop(key.namespace)
        return tuple(others)

    def invalidate(self, namespace: str, kind: str, name: str) -> None:
        """Make the next reconcile compare one object of a namespace's shared gateway with its manifest."""
        self._shared_gateways.invalidate(namespace, kind, name)

    def forget_keys(self, key: ServiceKey) -> None:
        """Make the next reconcile read a service's keys again, because a gateway rejected the token."""
        self._applied.forget(key)
        if key in self._members:
            self._shared_gateways.forget(key.namespace)


def token_refused_reason(service: InferenceService) -> BlockingReason:
    """Return the reason, with a remedy, to report if a gateway's token differs from the one in its Secret."""
    secret = (
        child_names.SHARED_GATEWAY if service.shares_gateway else child_names.root_keys_secret(service.name)
    )
    selector = f"{labels.SERVICE}={service.name}"
    if service.shares_gateway:
        selector = f"'{labels.GATEWAY_LABEL}={labels.SHARED}'"
    return BlockingReason(
        reasons.TOKEN_REFUSED,
        f"a gateway holds another token than Secret {secret}, which was recreated: "
        f"kubectl delete pods -l {selector} restarts all pods with the new keys",
    )
