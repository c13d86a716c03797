"""The gateway that a service has, its own or one that it shares: made, kept, and its keys rotated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.gateway.api_key_secrets import ApiKeySecrets, GatewayKey
from mizzen_operator.gateway.dedicated import DedicatedGateways
from mizzen_operator.gateway.shared import SharedGateways
from mizzen_operator.gateway.shared_readonly import SharedGateway
from mizzen_operator.gateway_client.routing_table import RoutingState
from mizzen_operator.keys.key_cache import KeyCache
from mizzen_operator.keys.rotation import KeyRotator, ServiceKeys, RotationProgress, rotation_progress
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
    """A service's gateway as a look has left it.

    Attributes:
        token: of its admin API.
        deployment: its Deployment as it is now.
        keys: the service's.
        shared: what it is to others, where it is shared.
        failure: why it is not as the spec asks for; the gateway that was there before serves on.
    """

    token: str
    deployment: Mapping[str, Any]
    keys: ServiceKeys
    shared: SharedGateway | None = None
    failure: BlockingReason | None = None

    @property
    def rotating(self) -> bool:
        """Whether keys of the service, or of the gateway that it shares, have a next generation."""
        return self.keys.rotating or (self.shared is not None and len(self.shared.public_keys) > 1)


class GatewayReconciler:
    """The gateways of all services."""

    def __init__(
        self,
        kube: KubeClient,
        config: OperatorConfig,
        *,
        metrics: Metrics,
        labelled: ApiKeySecrets,
        applier: Applier,
        applied: ApplyCache,
        record_key_time: Callable[[ServiceKey, str], None],
    ) -> None:
        self._keys = KeyCache(KeyRotator(kube, config, metrics, record_key_time), applied)
        self._dedicated = DedicatedGateways(config, labelled, applier, applied)
        self._applied = applied
        self._api_key_secrets = labelled
        self._shared_gateways = SharedGateways(kube, config, metrics, labelled, applier)
        self._sharing: set[ServiceKey] = set()

    def sharing(self, namespace: str) -> list[ServiceKey]:
        """Services that share the namespace's gateway, as far as they were looked at."""
        return [key for key in self._sharing if key.namespace == namespace]

    async def services_with_changed_api_keys(self) -> list[ServiceKey]:
        """Services whose gateway should mount other Secrets with API keys than it was seen to.

        Raises:
            KubeError: the API server failed.
        """
        found: list[ServiceKey] = []
        for namespace, gateway in await self._api_key_secrets.changed_gateways():
            if gateway == child_names.SHARED_GATEWAY:
                found += self.sharing(namespace)
            else:
                found.append(ServiceKey(namespace, child_names.service_of_gateway(gateway)))
        return found

    async def reconcile(self, key: ServiceKey, service: InferenceService, observed: ObservedState) -> ReconciledGateway:
        """Make what the service's gateway needs, and the gateway itself.

        Where the cluster does not take a change of a gateway that is there, groups are looked after all the
        same: that gateway goes on serving, and they may be lost meanwhile.

        Raises:
            Refused: an object of one of the names belongs to something else, or there is no gateway yet.
            KubeError: the API server failed, or rejects a gateway that is not there yet.
        """
        if service.shared:
            return await self._shared(key, service, observed)
        keys = await self._keys.sync(service)
        try:
            return ReconciledGateway(keys.token, await self._dedicated.apply(service, observed), keys)
        except (Refused, KubeError) as error:
            failure, live = rejection(error), observed.deployment
            if failure is None or live is None or not is_owned_by(live, service.uid):
                raise
            return ReconciledGateway(keys.token, live, keys, failure=failure)

    async def _shared(self, key: ServiceKey, service: InferenceService, observed: ObservedState) -> ReconciledGateway:
        self._sharing.add(key)
        self._shared_gateways.expire(service.namespace, settled=observed.settled)
        front = await self._shared_gateways.sync(service.namespace, observed.deployment, observed.gateway_service)
        if front is None:
            raise KubeError(0, "Vanished", f"{service.name} is no longer among the services of its namespace")
        keys = await self._keys.sync(service, front.public_keys)
        if self._shared_gateways.record_engine_keys(service, keys.engine):
            again = await self._shared_gateways.sync(service.namespace, front.deployment, observed.gateway_service)
            front = replace(again, changed=True) if again is not None else front
        return ReconciledGateway(front.token, front.deployment, keys, front, front.failure_for(service.name))

    async def advance_rotation(
        self, service: InferenceService, gateway: ReconciledGateway, groups: Sequence[Group], routing: RoutingState
    ) -> RotationProgress | None:
        """Drop the former keys once nobody uses them; says how far that is, None while nothing rotates.

        Raises:
            Refused: a Secret of the name belongs to something else.
            KubeError: the API server failed.
        """
        if not gateway.rotating:
            return None
        there = rotation_progress(gateway.keys, groups, routing)
        if not there.waiting_for:
            if gateway.keys.rotating:
                await self._keys.drop_previous(service)
            if gateway.shared is not None and self._shared_gateways.confirm_rotation(service, gateway.shared.public_keys[-1]):
                self._shared_gateways.forget(service.namespace)
        return there

    def affected_services(self, key: ServiceKey, gateway: ReconciledGateway | None) -> tuple[ServiceKey, ...]:
        """Services for which a look has changed something: they share its gateway."""
        if gateway is None or gateway.shared is None or not gateway.shared.changed:
            return ()
        return tuple(other for other in self.sharing(key.namespace) if other != key)

    def add_member(self, key: ServiceKey) -> None:
        """Have a service looked at when the gateway that it shares changes."""
        self._sharing.add(key)

    def remove_member(self, key: ServiceKey) -> tuple[ServiceKey, ...]:
        """Have the gateway that a service has shared serve the others alone; returns these."""
        if key not in self._sharing:
            return ()
        self._sharing.discard(key)
        others = self.sharing(key.namespace)
        if not others:
            self._api_key_secrets.forget(GatewayKey(key.namespace, child_names.SHARED_GATEWAY))
            self._shared_gateways.drop(key.namespace)
        return tuple(others)

    def invalidate(self, namespace: str, kind: str, name: str) -> None:
        """Compare one object of the gateway that a namespace's services share anew at the next look."""
        self._shared_gateways.invalidate(namespace, kind, name)

    def forget_keys(self, key: ServiceKey) -> None:
        """Read what is known of a service's keys anew: a gateway has another token."""
        self._applied.forget(key)
        if key in self._sharing:
            self._shared_gateways.forget(key.namespace)


def token_refused_reason(service: InferenceService) -> BlockingReason:
    """What to do where a gateway has another token than the service's Secret."""
    secret = child_names.SHARED_GATEWAY if service.shared else child_names.root_keys_secret(service.name)
    whose = f"{labels.SERVICE}={service.name}"
    if service.shared:
        whose = f"'{labels.GATEWAY_LABEL}={labels.SHARED}'"
    return BlockingReason(
        "TokenRefused",
        f"a gateway holds another token than Secret {secret}, which was made anew: "
        f"kubectl delete pods -l {whose} has all pods start with the new keys",
    )
