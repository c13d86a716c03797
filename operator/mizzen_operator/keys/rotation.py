"""Keeps the Secrets of each service, and rotates their keys without a restart.

Two generations are accepted while keys are rotated. Each step follows from the Secrets and from what gateways
say, so it does not matter who takes it, or how often: the next keys are published, gateways and engines find
them in their mounted files, and once every gateway says that it has them and reaches each ready engine with
them alone, the former ones are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.gateway_client.routing_table import RoutingState
from mizzen_operator.kube.apply import name_taken_error
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import Refused
from mizzen_operator.kube.objects import is_owned_by, timestamp
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.metrics import Metrics
from mizzen_operator.pods.group import Group
from mizzen_operator.resources import key_secrets as key_secrets
from mizzen_operator.resources.secret_data import annotation, read


@dataclass(frozen=True, slots=True)
class ServiceKeys:
    """A service's keys as they are now.

    Attributes:
        token: of its own gateway's admin API; empty where it shares one.
        engine: public keys of its engines.
        made: when the present generation was made, as Kubernetes writes it; empty for now.
        asked: the annotation that was obeyed last.
        target: what gateways call the newest keys of both sides.
        rotating: there is a next generation of the service's own Secrets.
        frozen: the Secret that an older release made so that it never changes; empty when there is none.
    """

    token: str
    engine: key_secrets.EngineKeys
    made: str
    ready_gateways: str
    target: str
    rotating: bool
    frozen: str = ""


@dataclass(frozen=True, slots=True)
class RotationProgress:
    """How far a rotation is.

    Attributes:
        waits: whom it waits for, in words; empty once all use the next keys alone.
    """

    generation: int
    waiting_for: str


class KeyRotator:
    """Makes the Secrets of services, and what a rotation changes of them."""

    def __init__(
        self,
        kube: KubeClient,
        config: OperatorConfig,
        metrics: Metrics,
        record_key_time: Callable[[ServiceKey, str], None],
    ) -> None:
        """Write Secrets; `record_key_time` gets the time at which each service's present keys were made."""
        self._kube = kube
        self._config = config
        self._metrics = metrics
        self._record_key_time = record_key_time

    def is_rotation_due(self, service: InferenceService, keys: ServiceKeys, now: datetime) -> bool:
        """Whether a service's keys should be rotated: it is asked for, or they are too old."""
        return not (keys.rotating or keys.frozen) and is_rotation_due(
            service.rotate_keys, keys.ready_gateways, keys.made, self._config.rotate_keys_days, now
        )

    async def sync(self, service: InferenceService, gateway_public: tuple[str, ...] = ()) -> ServiceKeys:
        """Make the service's Secrets what they should be; begin a rotation where one is due.

        Args:
            service: their owner.
            gateway_public: the public keys of the gateway that it shares: the present one, and perhaps the next.

        Raises:
            Refused: a Secret of the name belongs to something else, or lacks what it should hold.
            KubeError: the API server failed, or somebody else changed a Secret at the same time.
        """
        try:
            root = await self._root_secret(service)
            keys = _read_keys(root, gateway_public)
            if self.is_rotation_due(service, keys, datetime.now(UTC)):
                frozen = await self._immutable_secret(service)
                if not frozen:
                    given, now = key_secrets.fresh(shared=service.shared), timestamp(datetime.now(UTC))
                    patch = key_secrets.begin(root, given, service.rotate_keys, now)
                    root = await patch_secret(self._kube, self._metrics, root, patch)
                keys = _read_keys(root, gateway_public, frozen)
            for manifest in _mounted_secrets(service, root, gateway_public):
                live = await self._ensure_secret(service, manifest)
                patch = key_secrets.corrected(live, manifest, root)
                if patch is not None:
                    await patch_secret(self._kube, self._metrics, live, patch)
            return keys
        except ValueError as error:
            raise Refused("KeysUnusable", str(error)) from error

    async def drop_previous(self, service: InferenceService) -> None:
        """Drop the former generation. The Secrets that pods mount follow with the next `sync`.

        Raises:
            Refused: the Secret belongs to something else.
            KubeError: the API server failed, or somebody else changed the Secret at the same time.
        """
        root = await self._root_secret(service)
        if key_secrets.rotating(root):
            await patch_secret(self._kube, self._metrics, root, key_secrets.finish(root))

    async def _immutable_secret(self, service: InferenceService) -> str:
        """A Secret of the service that an older release made immutable; kubelet would not follow it."""
        names = [child_names.root_keys_secret(service.name), child_names.engine_keys_secret(service.name)]
        if not service.shared:
            names.append(child_names.gateway_keys_secret(service.name))
        for name in names:
            live = await self._kube.get(ObjectRef("Secret", service.namespace, name))
            if live is not None and live.get("immutable"):
                return name
        return ""

    async def _root_secret(self, service: InferenceService) -> Mapping[str, Any]:
        """The Secret that the others follow from; when it is lost, it is made of those that are left."""
        if not service.status and (made := await self._create(service, key_secrets.root_keys(service))):
            return made
        ref = ObjectRef("Secret", service.namespace, child_names.root_keys_secret(service.name))
        # Read once: if it were lost between two reads, keys that fit nobody's would be made in its place.
        if (live := await self._kube.get(ref)) is not None:
            return self._require_owned(service, live)
        names = [child_names.engine_keys_secret(service.name)]
        if not service.shared:
            names.append(child_names.gateway_keys_secret(service.name))
        mounted = [await self._kube.get(ObjectRef("Secret", service.namespace, name)) for name in names]
        left = [secret for secret in mounted if secret is not None and is_owned_by(secret, service.uid)]
        if len(left) < len(names):
            return await self._ensure_secret(service, key_secrets.root_keys(service))
        if service.shared:
            return await self._ensure_secret(service, key_secrets.restored_engine_key(service, left[0]))
        return await self._ensure_secret(service, key_secrets.restored_keys(service, *left))

    async def _create(self, service: InferenceService, manifest: dict[str, Any]) -> Mapping[str, Any] | None:
        """Create a Secret; None when one of its name is there."""
        if not await self._kube.create(manifest):
            return None
        self._metrics.actions.labels("CreateSecret").inc()
        self._record_time(service, manifest)
        return manifest

    async def _ensure_secret(self, service: InferenceService, manifest: dict[str, Any]) -> Mapping[str, Any]:
        """The Secret of a manifest's name; made when it is missing, which it is while a service is new."""
        ref = ObjectRef("Secret", service.namespace, manifest["metadata"]["name"])
        live = await self._kube.get(ref) if service.status else None
        if live is None:
            if made := await self._create(service, manifest):
                return made
            live = await self._kube.get(ref) or manifest
        return self._require_owned(service, live)

    def _require_owned(self, service: InferenceService, live: Mapping[str, Any]) -> Mapping[str, Any]:
        require_owned(service, live)
        self._record_time(service, live)
        return live

    def _record_time(self, service: InferenceService, secret: Mapping[str, Any]) -> None:
        """Note the age of the keys in the Secret that a service's others follow from."""
        if secret["metadata"]["name"] == child_names.root_keys_secret(service.name):
            self._record_key_time(ServiceKey(service.namespace, service.name), key_secrets.made(secret))


async def patch_secret(
    kube: KubeClient, metrics: Metrics, secret: Mapping[str, Any], patch: dict[str, Any]
) -> Mapping[str, Any]:
    """Change a Secret that is still as it was read; the Secret as it is then.

    Raises:
        KubeError: the API server failed, or somebody else changed the Secret at the same time.
    """
    meta = secret["metadata"]
    metrics.actions.labels("PatchSecret").inc()
    ref = ObjectRef("Secret", meta["namespace"], meta["name"])
    await kube.patch(ref, patch)
    return await kube.get(ref) or key_secrets.applied(secret, patch)


def rotation_progress(keys: ServiceKeys, groups: Sequence[Group], routing: RoutingState) -> RotationProgress:
    """How far all who are to use the newest keys do, and nothing else.

    A gateway or engine that is not ready reads its files before it is, and needs no waiting for.
    """
    ready = [group for group in groups if group.live and group.containers_ready]
    late = [group.name for group in ready if routing.engine_key_names.get(group.uid) != frozenset((keys.target,))]
    waits = ""
    if not routing.ready_gateways:
        waits = "a gateway that is ready"
    elif routing.reporting_gateways < routing.ready_gateways:
        waits = f"{routing.ready_gateways - routing.reporting_gateways} gateways that do not answer"
    elif keys.target not in routing.key_names:
        waits = "gateways that have not read them yet"
    elif late:
        waits = f"{len(late)} of {len(ready)} groups that are not reached with them alone yet: {late[0]}"
    return RotationProgress(keys.engine.generation + (len(keys.engine.public) > 1), waits)


def require_owned(service: InferenceService, live: Mapping[str, Any]) -> None:
    """Check that an object belongs to a service.

    Raises:
        Refused: it does not.
    """
    if not is_owned_by(live, service.uid):
        raise name_taken_error(live, service.name)


def is_rotation_due(request: str, handled_request: str, made: str, days: float, now: datetime) -> bool:
    """Whether keys should be rotated: it is asked for and was not obeyed yet, or they are too old."""
    if request and request != handled_request:
        return True
    if not (days and made):
        return False
    return now - datetime.fromisoformat(made) > timedelta(days=days)


def _read_keys(root: Mapping[str, Any], gateway_public: tuple[str, ...], frozen: str = "") -> ServiceKeys:
    engine = key_secrets.engine_keys(root)
    gateways = gateway_public or key_secrets.public_keys(root, labels.GATEWAY)
    return ServiceKeys(
        token="" if gateway_public else read(root, labels.ADMIN_TOKEN),
        engine=engine,
        made=key_secrets.made(root),
        ready_gateways=annotation(root, labels.ROTATE_KEYS),
        target=key_secrets.name_of(engine.public[-1], gateways[-1]),
        rotating=key_secrets.rotating(root),
        frozen=frozen,
    )


def _mounted_secrets(
    service: InferenceService, root: Mapping[str, Any], gateway_public: tuple[str, ...]
) -> list[dict[str, Any]]:
    if gateway_public:
        return [key_secrets.mounted_engine_keys(service, root, gateway_public)]
    return key_secrets.mounted_keys(service, root)
