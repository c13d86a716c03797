# SPDX-License-Identifier: Apache-2.0
"""Reconciles the gateway that the services of a namespace share, and the gateway's keys.

`reconcile.py` calls it in the reconcile of each sharing service; a lock per namespace serializes these calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from mizzen_operator.api import child_names, labels, reasons
from mizzen_operator.api.gateway_sharing import GatewaySharing, resolve_sharing
from mizzen_operator.api.parse import InvalidServiceError, parse_service
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.gateway.api_key_secrets import ApiKeySecrets
from mizzen_operator.gateway.shared_readonly import SharedGateway, SharedGatewayReader, live_owner_names
from mizzen_operator.keys.rotation import is_rotation_due, patch_secret
from mizzen_operator.kube.apply import Applier, name_taken_error
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError, Refused, rejection
from mizzen_operator.kube.objects import timestamp
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.metrics import Metrics
from mizzen_operator.resources.gateway_deployment import gateway_account, gateway_manifests
from mizzen_operator.resources.gateway_spec import GatewaySpec
from mizzen_operator.resources.key_secrets import (
    EngineKeys,
    begin_rotation,
    engine_keys,
    finish_rotation,
    is_rotating,
    keys_created,
    public_keys,
)
from mizzen_operator.resources.pod_disruption_budget import gateway_disruption_budget
from mizzen_operator.resources.secret_data import annotation, read_value
from mizzen_operator.resources.shared_gateway import (
    generate_gateway_keys,
    owners_patch,
    services_config_map,
    shared_gateway_spec,
    shared_keys_secret,
)


@dataclass(slots=True)
class _SharedState:
    """State of one namespace's shared gateway."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    record_since: float = 0.0
    """Monotonic time at which `digests` was last cleared."""
    digests: dict[tuple[str, str], str] = field(default_factory=dict)
    """Digest of each applied manifest, by kind and name."""
    previous_digests: dict[tuple[str, str], str] = field(default_factory=dict)
    """Digests at the end of the previous reconcile."""
    uids: dict[str, str] = field(default_factory=dict)
    """Uids of the sharing services, by name."""
    engine_public_keys: dict[str, tuple[str, EngineKeys]] = field(default_factory=dict)
    """Uid of each sharing service and public keys of its engines, by service name."""
    gateway_public_keys: tuple[str, ...] = ()
    """Public keys of the gateway: the present one, and the next one during a rotation."""
    token: str = ""
    created_at: str = ""
    """Creation time of the gateway's present keys."""
    handled_request: str = ""
    """Value of the rotate-keys annotation that was handled last."""
    immutable: bool = False
    """Whether an older release made the Secret immutable."""
    confirmed: dict[str, str] = field(default_factory=dict)
    """Newest gateway key that each service's engines accept, by the service's uid."""

    def drop_other_services(self, uids: Mapping[str, str]) -> None:
        """Drop the state of services that no longer share the gateway.

        Args:
            uids: uids of the services that share it, by name.
        """
        self.engine_public_keys = {
            name: known for name, known in self.engine_public_keys.items() if name in uids
        }
        current = set(uids.values())
        self.confirmed = {uid: key for uid, key in self.confirmed.items() if uid in current}


class SharedGateways:
    """The shared gateways of all namespaces."""

    def __init__(
        self,
        kube: KubeClient,
        config: OperatorConfig,
        metrics: Metrics,
        api_key_secrets: ApiKeySecrets,
        applier: Applier,
    ) -> None:
        self._kube = kube
        self._config = config
        self._metrics = metrics
        self._api_key_secrets = api_key_secrets
        self._applier = applier
        self._reader = SharedGatewayReader(kube)
        self._states: defaultdict[str, _SharedState] = defaultdict(_SharedState)

    def expire(self, namespace: str, *, settled: bool) -> None:
        """Drop the record of a gateway's applied children if it is too old.

        The maximum age is `resync_seconds` if all pods run (`settled`), and `recheck_seconds` otherwise.
        """
        limit = self._config.resync_seconds if settled else self._config.recheck_seconds
        state = self._states[namespace]
        if time.monotonic() - state.record_since > limit:
            self.forget(namespace)

    def invalidate(self, namespace: str, kind: str, name: str) -> None:
        """Make the next reconcile compare one object of a gateway with its manifest."""
        if namespace in self._states:
            self._states[namespace].digests.pop((kind, name), None)

    def forget(self, namespace: str) -> None:
        """Drop the record of a gateway's applied children and keys."""
        state = self._states[namespace]
        state.record_since = time.monotonic()
        state.digests.clear()
        state.gateway_public_keys, state.token = (), ""

    def drop(self, namespace: str) -> None:
        """Drop the state of a namespace in which no service shares a gateway any more."""
        self._states.pop(namespace, None)

    def confirm_rotation(self, service: InferenceService, public: str) -> bool:
        """Record that a service's engines accept a public key of the gateway.

        Returns:
            Whether another key, or no key, was recorded before.
        """
        confirmed = self._states[service.namespace].confirmed
        changed = confirmed.get(service.uid) != public
        confirmed[service.uid] = public
        return changed

    def record_engine_keys(self, service: InferenceService, public: EngineKeys) -> bool:
        """Record the public keys of a service's engines; return whether they have changed."""
        known = self._states[service.namespace].engine_public_keys
        changed = known.get(service.name) != (service.uid, public)
        known[service.name] = (service.uid, public)
        return changed

    async def sync(
        self,
        namespace: str,
        deployment: Mapping[str, Any] | None = None,
        endpoint: Mapping[str, Any] | None = None,
    ) -> SharedGateway | None:
        """Reconcile a namespace's shared gateway; return None if no service uses a shared gateway.

        Args:
            namespace: the namespace.
            deployment: live Deployment of the gateway, if it exists.
            endpoint: live Service of the gateway, if it exists.

        Raises:
            Refused: an object with a name that the gateway needs belongs to something else.
            KubeError: the API server failed, or rejected a manifest.
        """
        state = self._states[namespace]
        async with state.lock:
            services, invalid = await self._list_services(namespace)
            sharing = resolve_sharing(services)
            if sharing is None:
                # The objects are garbage-collected. Another reconcile may have dropped the state already.
                self._states.pop(namespace, None)
                return None
            if co_owned := live_owner_names(deployment, invalid):
                # An update without the invalid services would stop serving them, or change the settings.
                return await self._reader.read_unchanged(namespace, deployment or {}, sharing, co_owned)
            spec, public = shared_gateway_spec(sharing), state.gateway_public_keys
            spec = replace(spec, labelled_secrets=await self._api_key_secrets.find(spec))
            await self._sync_secret(spec, state, sharing)
            public_keys = {
                service.name: state.engine_public_keys[service.name][1]
                for service in sharing.services
                if state.engine_public_keys.get(service.name, ("",))[0] == service.uid
            }
            for service in sharing.services:
                if service.name not in public_keys and (key := await self._read_engine_keys(service)):
                    public_keys[service.name] = key
                    self.record_engine_keys(service, key)
            config_map = services_config_map(sharing, spec, public_keys)
            observed = {"Deployment": deployment, "Service": endpoint}
            budgets, wanted = [gateway_disruption_budget(spec)], spec.disruption_budgets
            failure, live = None, deployment or {}
            try:
                account = await self._applier.apply_and_get_uid(
                    gateway_account(spec), state.digests, require_shared_gateway
                )
                manifests = [
                    config_map,
                    *gateway_manifests(replace(spec, service_account_uid=account), self._config),
                ]
                live = await self._applier.apply(manifests, observed, state.digests, require_shared_gateway)
                await self._applier.apply_or_delete(
                    budgets, state.digests, require_shared_gateway, wanted=wanted
                )
            except (Refused, KubeError) as error:
                failure = rejection(error)
                if failure is None or deployment is None:
                    raise
                require_shared_gateway(deployment)
            uids = {service.name: service.uid for service in sharing.services}
            changed = (
                uids != state.uids
                or state.previous_digests != state.digests
                or state.gateway_public_keys != public
            )
            state.uids, state.previous_digests = uids, dict(state.digests)
            state.drop_other_services(uids)
            return SharedGateway(
                sharing,
                live,
                public_keys=state.gateway_public_keys,
                token=state.token,
                changed=changed,
                failure=failure,
            )

    async def _list_services(self, namespace: str) -> tuple[list[InferenceService], list[Mapping[str, Any]]]:
        """Return a namespace's services: first those with a valid spec, parsed; then the other objects."""
        services: list[InferenceService] = []
        invalid: list[Mapping[str, Any]] = []
        for body in await self._kube.list(ObjectRef("InferenceService", namespace)):
            try:
                services.append(parse_service(body))
            except InvalidServiceError:  # its own reconcile reports it
                invalid.append(body)
        return services, invalid

    async def _sync_secret(self, spec: GatewaySpec, state: _SharedState, sharing: GatewaySharing) -> None:
        """Create the gateway's Secret if it is missing, update its owners, and rotate its keys."""
        owner_uids = {owner["name"]: owner["uid"] for owner in spec.metadata()["ownerReferences"]}
        request, days, now = sharing.oldest.rotate_keys, self._config.rotate_keys_days, datetime.now(UTC)
        rotate = not state.immutable and is_rotation_due(
            request, state.handled_request, state.created_at, days, now
        )
        if state.token and owner_uids == state.uids and len(state.gateway_public_keys) == 1 and not rotate:
            return
        ref = ObjectRef("Secret", spec.namespace, spec.keys_secret)
        live = await self._kube.get(ref)
        if live is None:
            manifest = shared_keys_secret(spec, request)
            if await self._kube.create(manifest):
                self._metrics.actions.labels("CreateSecret").inc()
                live = manifest
            else:
                live = await self._kube.get(ref) or manifest
        require_shared_gateway(live)
        if "resourceVersion" in live["metadata"] and (patch := owners_patch(live, spec)) is not None:
            live = await patch_secret(self._kube, self._metrics, live, patch)
        try:
            live = await self._advance_rotation(live, state, sharing)
            state.gateway_public_keys = public_keys(live, labels.GATEWAY)
            state.token = read_value(live, labels.ADMIN_TOKEN)
        except ValueError as error:
            raise Refused(reasons.KEYS_UNUSABLE, str(error)) from error
        state.created_at, state.handled_request = keys_created(live), annotation(live, labels.ROTATE_KEYS)
        state.immutable = bool(live.get("immutable"))

    async def _advance_rotation(
        self, live: Mapping[str, Any], state: _SharedState, sharing: GatewaySharing
    ) -> Mapping[str, Any]:
        """Begin a key rotation of the gateway if one is due; finish it once all engines accept the new key.

        Returns:
            The Secret with the gateway's keys, after the change.
        """
        if live.get("immutable"):
            return live
        if is_rotating(live):
            newest = public_keys(live, labels.GATEWAY)[-1]
            if all(state.confirmed.get(service.uid) == newest for service in sharing.services):
                return await patch_secret(self._kube, self._metrics, live, finish_rotation(live))
            return live
        request, now = sharing.oldest.rotate_keys, datetime.now(UTC)
        handled_request, days = annotation(live, labels.ROTATE_KEYS), self._config.rotate_keys_days
        if is_rotation_due(request, handled_request, keys_created(live), days, now):
            patch = begin_rotation(live, generate_gateway_keys(), request, timestamp(now))
            return await patch_secret(self._kube, self._metrics, live, patch)
        return live

    async def _read_engine_keys(self, service: InferenceService) -> EngineKeys | None:
        """Return the public keys of a service's engines; None if the service has none yet."""
        ref = ObjectRef("Secret", service.namespace, child_names.engine_keys_secret(service.name))
        live = await self._kube.get(ref)
        if live is None:
            return None
        try:
            return engine_keys(live)
        except ValueError:
            return None  # the service's own reconcile reports it


def require_shared_gateway(live: Mapping[str, Any]) -> None:
    """Check that an object belongs to the shared gateway.

    Raises:
        Refused: the object belongs to something else.
    """
    if live["metadata"].get("labels", {}).get(labels.GATEWAY_LABEL) != labels.SHARED:
        raise name_taken_error(live)
