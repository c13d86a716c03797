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
from mizzen_operator.api.parse import ApiError, parse
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.gateway.api_key_secrets import LabelledSecrets
from mizzen_operator.gateway.shared_readonly import SharedGateway, Standing, owners
from mizzen_operator.keys.rotation import change_secret, due
from mizzen_operator.kube.apply import Applier, name_taken
from mizzen_operator.kube.client import Kube
from mizzen_operator.kube.errors import KubeError, Refused, rejection
from mizzen_operator.kube.objects import stamp
from mizzen_operator.kube.refs import Ref
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
class _Namespace:
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
        kube: Kube,
        config: OperatorConfig,
        metrics: Metrics,
        labelled: LabelledSecrets,
        applier: Applier,
    ) -> None:
        self._kube = kube
        self._config = config
        self._metrics = metrics
        self._labelled = labelled
        self._applier = applier
        self._standing = Standing(kube)
        self._namespaces: defaultdict[str, _Namespace] = defaultdict(_Namespace)

    def refresh(self, namespace: str, *, settled: bool) -> None:
        """Drop what is remembered of what no watch tells of, when it is too old for how the gateway is."""
        limit = self._config.resync_seconds if settled else self._config.recheck_seconds
        memory = self._namespaces[namespace]
        if time.monotonic() - memory.checked > limit:
            self.forget(namespace)

    def doubt(self, namespace: str, kind: str, name: str) -> None:
        """Compare one of a gateway's objects anew at the next look."""
        if namespace in self._namespaces:
            self._namespaces[namespace].digests.pop((kind, name), None)

    def forget(self, namespace: str) -> None:
        """Drop what is remembered of a gateway's objects."""
        memory = self._namespaces[namespace]
        memory.checked = time.monotonic()
        memory.digests.clear()
        memory.public, memory.token = (), ""

    def drop(self, namespace: str) -> None:
        """Drop all that is remembered of a namespace whose gateway no service shares any more."""
        self._namespaces.pop(namespace, None)

    def confirm(self, service: InferenceService, public: str) -> bool:
        """Note that a service's engines take a key of the gateway; tell whether that is news."""
        confirmed = self._namespaces[service.namespace].confirmed
        news = confirmed.get(service.uid) != public
        confirmed[service.uid] = public
        return news

    def learn(self, service: InferenceService, public: EngineKeys) -> bool:
        """Remember the CURVE keys of a service's engines; tell whether they are news."""
        known = self._namespaces[service.namespace].public_keys
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
        memory = self._namespaces[namespace]
        async with memory.lock:
            services, unread = await self._services(namespace)
            sharing = resolve_sharing(services)
            if sharing is None:
                # The garbage collector removes what its last owner leaves. Another look may have been first.
                self._namespaces.pop(namespace, None)
                return None
            if co_owned := owners(deployment, unread):
                # Without one of those whom it serves, it would stop serving it, or take another's settings.
                return await self._standing.gateway(namespace, deployment or {}, sharing, co_owned)
            front, public = shared(sharing), memory.public
            front = replace(front, labelled=await self._labelled.find(front))
            await self._keys(front, memory, sharing)
            public_keys = {
                service.name: memory.public_keys[service.name][1]
                for service in sharing.services
                if memory.public_keys.get(service.name, ("",))[0] == service.uid
            }
            for service in sharing.services:
                if service.name not in public_keys and (key := await self._engine_key(service)):
                    public_keys[service.name] = key
                    self.learn(service, key)
            listed = services_config_map(sharing, front, public_keys)
            seen = {"Deployment": deployment, "Service": endpoint}
            budgets, wanted = [gateway_budget(front)], front.disruption_budgets
            failure, live = None, deployment or {}
            try:
                account = await self._applier.identity(gateway_account(front), memory.digests, require_shared)
                manifests = [listed, *gateway_manifests(replace(front, account=account), self._config)]
                live = await self._applier.apply(manifests, seen, memory.digests, require_shared)
                await self._applier.keep(budgets, memory.digests, require_shared, wanted=wanted)
            except (Refused, KubeError) as error:
                failure = rejection(error)
                if failure is None or deployment is None:
                    raise
                require_shared(deployment)
            uids = {service.name: service.uid for service in sharing.services}
            changed = uids != memory.uids or memory.last != memory.digests or memory.public != public
            memory.uids, memory.last = uids, dict(memory.digests)
            memory.forget_others(uids)
            return SharedGateway(sharing, live, memory.public, memory.token, changed, failure)

    async def _services(self, namespace: str) -> tuple[list[InferenceService], list[Mapping[str, Any]]]:
        """The services of a namespace, and those whose spec cannot be read as they are."""
        found: list[InferenceService] = []
        unread: list[Mapping[str, Any]] = []
        for body in await self._kube.list(Ref("InferenceService", namespace)):
            try:
                found.append(parse(body))
            except ApiError:  # its own look says so
                unread.append(body)
        return found, unread

    async def _keys(self, front: Front, memory: _Namespace, sharing: GatewaySharing) -> None:
        """Make the gateway's Secret where it is missing, keep its owners up to date, and rotate its keys."""
        owners = {one["name"]: one["uid"] for one in front.metadata()["ownerReferences"]}
        wish, days, now = sharing.oldest.rotate_keys, self._config.rotate_keys_days, datetime.now(UTC)
        rotate = not memory.frozen and due(wish, memory.asked, memory.made, days, now)
        if memory.token and owners == memory.uids and len(memory.public) == 1 and not rotate:
            return
        ref = Ref("Secret", front.namespace, front.keys)
        live = await self._kube.get(ref)
        if live is None:
            manifest = shared_keys(front, wish)
            if await self._kube.create(manifest):
                self._metrics.actions.labels("CreateSecret").inc()
                live = manifest
            else:
                live = await self._kube.get(ref) or manifest
        require_shared(live)
        if "resourceVersion" in live["metadata"] and (patch := owners_patch(live, front)) is not None:
            live = await change_secret(self._kube, self._metrics, live, patch)
        try:
            live = await self._rotated(live, memory, sharing)
            memory.public, memory.token = public_keys(live, labels.GATEWAY), read(live, labels.ADMIN_TOKEN)
        except ValueError as error:
            raise Refused("KeysUnusable", str(error)) from error
        memory.made, memory.asked = made(live), annotation(live, labels.ROTATE_KEYS)
        memory.frozen = bool(live.get("immutable"))

    async def _rotated(
        self, live: Mapping[str, Any], memory: _Namespace, sharing: GatewaySharing
    ) -> Mapping[str, Any]:
        """Begin or end a rotation of the gateway's own keys where it is time to; the Secret as it is then."""
        if live.get("immutable"):
            return live
        if rotating(live):
            newest = public_keys(live, labels.GATEWAY)[-1]
            if all(memory.confirmed.get(one.uid) == newest for one in sharing.services):
                return await change_secret(self._kube, self._metrics, live, finish(live))
            return live
        wish, now = sharing.oldest.rotate_keys, datetime.now(UTC)
        obeyed, days = annotation(live, labels.ROTATE_KEYS), self._config.rotate_keys_days
        if due(wish, obeyed, made(live), days, now):
            patch = begin(live, fresh_shared_keys(), wish, stamp(now))
            return await change_secret(self._kube, self._metrics, live, patch)
        return live

    async def _engine_key(self, service: InferenceService) -> EngineKeys | None:
        """The public keys of a service's engines; None before the service has them."""
        ref = Ref("Secret", service.namespace, child_names.engine_keys_secret(service.name))
        live = await self._kube.get(ref)
        if live is None:
            return None
        try:
            return engine_keys(live)
        except ValueError:
            return None  # the service's own look says so


def require_shared(live: Mapping[str, Any]) -> None:
    """Check that an object is the shared gateway's.

    Raises:
        Refused: it is not.
    """
    if live["metadata"].get("labels", {}).get(labels.GATEWAY_LABEL) != labels.SHARED:
        raise name_taken(live)
