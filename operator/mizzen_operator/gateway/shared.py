"""The gateway that the services of a namespace share: made, kept, and told whom it serves."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.gateway_sharing import GatewaySharing, resolve_sharing
from mizzen_operator.api.parse import InvalidServiceError, parse_service
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.gateway.api_key_secrets import ApiKeySecrets
from mizzen_operator.gateway.shared_readonly import SharedGateway, SharedGatewayReader, live_owner_names
from mizzen_operator.keys.rotation import patch_secret, is_rotation_due
from mizzen_operator.kube.apply import Applier, name_taken_error
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError, Refused, rejection
from mizzen_operator.kube.objects import timestamp
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.metrics import Metrics
from mizzen_operator.resources.gateway_deployment import gateway_account, gateway_manifests
from mizzen_operator.resources.gateway_spec import Front
from mizzen_operator.resources.key_secrets import (
    EngineKeys,
    begin,
    engine_keys,
    finish,
    made,
    public_keys,
    rotating,
)
from mizzen_operator.resources.pod_disruption_budget import gateway_budget
from mizzen_operator.resources.secret_data import annotation, read
from mizzen_operator.resources.shared_gateway import (
    fresh_shared_keys,
    owners_patch,
    services_config_map,
    shared,
    shared_keys,
)


@dataclass(slots=True)
class _SharedState:
    """What is known of one namespace's shared gateway."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    checked: float = 0.0
    digests: dict[tuple[str, str], str] = field(default_factory=dict)
    """Of what is known to be there,"""
    last: dict[tuple[str, str], str] = field(default_factory=dict)
    """and of what was asked for at the last look."""
    uids: dict[str, str] = field(default_factory=dict)
    """Of the services that share it, by name."""
    public_keys: dict[str, tuple[str, EngineKeys]] = field(default_factory=dict)
    """Of their engines: uid of the service and CURVE keys, by name."""
    public: tuple[str, ...] = ()
    token: str = ""
    made: str = ""
    asked: str = ""
    frozen: bool = False
    """The Secret was made by an older release so that it never changes."""
    confirmed: dict[str, str] = field(default_factory=dict)
    """Uids of services whose engines take the gateway's newest key, with that key."""

    def forget_others(self, uids: Mapping[str, str]) -> None:
        """Drop what is known of services that share the gateway no more; `uids` are the others', by name."""
        self.public_keys = {name: known for name, known in self.public_keys.items() if name in uids}
        there = set(uids.values())
        self.confirmed = {uid: key for uid, key in self.confirmed.items() if uid in there}


class SharedGateways:
    """All shared gateways, one a namespace; one at a time is worked on in each."""

    def __init__(
        self,
        kube: KubeClient,
        config: OperatorConfig,
        metrics: Metrics,
        labelled: ApiKeySecrets,
        applier: Applier,
    ) -> None:
        self._kube = kube
        self._config = config
        self._metrics = metrics
        self._api_key_secrets = labelled
        self._applier = applier
        self._reader = SharedGatewayReader(kube)
        self._states: defaultdict[str, _SharedState] = defaultdict(_SharedState)

    def expire(self, namespace: str, *, settled: bool) -> None:
        """Drop what is remembered of what no watch tells of, when it is too old for how the gateway is."""
        limit = self._config.resync_seconds if settled else self._config.recheck_seconds
        state = self._states[namespace]
        if time.monotonic() - state.checked > limit:
            self.forget(namespace)

    def invalidate(self, namespace: str, kind: str, name: str) -> None:
        """Compare one of a gateway's objects anew at the next look."""
        if namespace in self._states:
            self._states[namespace].digests.pop((kind, name), None)

    def forget(self, namespace: str) -> None:
        """Drop what is remembered of a gateway's objects."""
        state = self._states[namespace]
        state.checked = time.monotonic()
        state.digests.clear()
        state.public, state.token = (), ""

    def drop(self, namespace: str) -> None:
        """Drop all that is remembered of a namespace whose gateway no service shares any more."""
        self._states.pop(namespace, None)

    def confirm_rotation(self, service: InferenceService, public: str) -> bool:
        """Note that a service's engines take a key of the gateway; tell whether that is news."""
        confirmed = self._states[service.namespace].confirmed
        news = confirmed.get(service.uid) != public
        confirmed[service.uid] = public
        return news

    def record_engine_keys(self, service: InferenceService, public: EngineKeys) -> bool:
        """Remember the CURVE keys of a service's engines; tell whether they are news."""
        known = self._states[service.namespace].public_keys
        news = known.get(service.name) != (service.uid, public)
        known[service.name] = (service.uid, public)
        return news

    async def sync(
        self,
        namespace: str,
        deployment: Mapping[str, Any] | None = None,
        endpoint: Mapping[str, Any] | None = None,
    ) -> SharedGateway | None:
        """Make a namespace's shared gateway what its services ask for; None when none shares one.

        Args:
            namespace: whose gateway it is.
            deployment: the gateway's Deployment as it was observed, None when there is none.
            endpoint: the same of its Service.

        Raises:
            Refused: an object of one of the names belongs to something else.
            KubeError: the API server failed or found a manifest invalid.
        """
        state = self._states[namespace]
        async with state.lock:
            services, invalid = await self._list_services(namespace)
            sharing = resolve_sharing(services)
            if sharing is None:
                # The garbage collector removes what its last owner leaves. Another look may have been first.
                self._states.pop(namespace, None)
                return None
            if co_owned := live_owner_names(deployment, invalid):
                # Without one of those whom it serves, it would stop serving it, or take another's settings.
                return await self._reader.read(namespace, deployment or {}, sharing, co_owned)
            front, public = shared(sharing), state.public
            front = replace(front, api_key_secrets=await self._api_key_secrets.find(front))
            await self._sync_secret(front, state, sharing)
            public_keys = {
                service.name: state.public_keys[service.name][1]
                for service in sharing.services
                if state.public_keys.get(service.name, ("",))[0] == service.uid
            }
            for service in sharing.services:
                if service.name not in public_keys and (key := await self._read_engine_keys(service)):
                    public_keys[service.name] = key
                    self.record_engine_keys(service, key)
            listed = services_config_map(sharing, front, public_keys)
            seen = {"Deployment": deployment, "Service": endpoint}
            budgets, wanted = [gateway_budget(front)], front.disruption_budgets
            failure, live = None, deployment or {}
            try:
                account = await self._applier.apply_and_get_uid(
                    gateway_account(front), state.digests, require_shared_gateway
                )
                manifests = [listed, *gateway_manifests(replace(front, account=account), self._config)]
                live = await self._applier.apply(manifests, seen, state.digests, require_shared_gateway)
                await self._applier.apply_or_delete(budgets, state.digests, require_shared_gateway, wanted=wanted)
            except (Refused, KubeError) as error:
                failure = rejection(error)
                if failure is None or deployment is None:
                    raise
                require_shared_gateway(deployment)
            uids = {service.name: service.uid for service in sharing.services}
            changed = uids != state.uids or state.last != state.digests or state.public != public
            state.uids, state.last = uids, dict(state.digests)
            state.forget_others(uids)
            return SharedGateway(sharing, live, state.public, state.token, changed, failure)

    async def _list_services(self, namespace: str) -> tuple[list[InferenceService], list[Mapping[str, Any]]]:
        """The services of a namespace, and those whose spec cannot be read as they are."""
        found: list[InferenceService] = []
        invalid: list[Mapping[str, Any]] = []
        for body in await self._kube.list(ObjectRef("InferenceService", namespace)):
            try:
                found.append(parse_service(body))
            except InvalidServiceError:  # its own look says so
                invalid.append(body)
        return found, invalid

    async def _sync_secret(self, front: Front, state: _SharedState, sharing: GatewaySharing) -> None:
        """Make the gateway's Secret where it is missing, keep its owners up to date, and rotate its keys."""
        live_owner_names = {one["name"]: one["uid"] for one in front.metadata()["ownerReferences"]}
        wish, days, now = sharing.oldest.rotate_keys, self._config.rotate_keys_days, datetime.now(UTC)
        rotate = not state.frozen and is_rotation_due(wish, state.asked, state.made, days, now)
        if state.token and live_owner_names == state.uids and len(state.public) == 1 and not rotate:
            return
        ref = ObjectRef("Secret", front.namespace, front.keys)
        live = await self._kube.get(ref)
        if live is None:
            manifest = shared_keys(front, wish)
            if await self._kube.create(manifest):
                self._metrics.actions.labels("CreateSecret").inc()
                live = manifest
            else:
                live = await self._kube.get(ref) or manifest
        require_shared_gateway(live)
        if "resourceVersion" in live["metadata"] and (patch := owners_patch(live, front)) is not None:
            live = await patch_secret(self._kube, self._metrics, live, patch)
        try:
            live = await self._advance_rotation(live, state, sharing)
            state.public, state.token = public_keys(live, labels.GATEWAY), read(live, labels.ADMIN_TOKEN)
        except ValueError as error:
            raise Refused("KeysUnusable", str(error)) from error
        state.made, state.asked = made(live), annotation(live, labels.ROTATE_KEYS)
        state.frozen = bool(live.get("immutable"))

    async def _advance_rotation(
        self, live: Mapping[str, Any], state: _SharedState, sharing: GatewaySharing
    ) -> Mapping[str, Any]:
        """Begin or end a rotation of the gateway's own keys where it is time to; the Secret as it is then."""
        if live.get("immutable"):
            return live
        if rotating(live):
            newest = public_keys(live, labels.GATEWAY)[-1]
            if all(state.confirmed.get(one.uid) == newest for one in sharing.services):
                return await patch_secret(self._kube, self._metrics, live, finish(live))
            return live
        wish, now = sharing.oldest.rotate_keys, datetime.now(UTC)
        obeyed, days = annotation(live, labels.ROTATE_KEYS), self._config.rotate_keys_days
        if is_rotation_due(wish, obeyed, made(live), days, now):
            patch = begin(live, fresh_shared_keys(), wish, timestamp(now))
            return await patch_secret(self._kube, self._metrics, live, patch)
        return live

    async def _read_engine_keys(self, service: InferenceService) -> EngineKeys | None:
        """The public keys of a service's engines; None before the service has them."""
        ref = ObjectRef("Secret", service.namespace, child_names.engine_keys_secret(service.name))
        live = await self._kube.get(ref)
        if live is None:
            return None
        try:
            return engine_keys(live)
        except ValueError:
            return None  # the service's own look says so


def require_shared_gateway(live: Mapping[str, Any]) -> None:
    """Check that an object is the shared gateway's.

    Raises:
        Refused: it is not.
    """
    if live["metadata"].get("labels", {}).get(labels.GATEWAY_LABEL) != labels.SHARED:
        raise name_taken_error(live)
