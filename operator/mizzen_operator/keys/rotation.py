# SPDX-License-Identifier: Apache-2.0
"""Writes the Secrets of each service, and rotates their keys without restarts.

During a rotation, two generations of keys are accepted. The next keys are written into the Secrets. Gateways
and engines find them in their mounted files. Once every gateway reports that it has read them, and that it
reaches each ready engine with the next keys alone, the previous keys are dropped. Each step follows from the
Secrets and the gateways' reports, so it does not matter which replica takes it, or how often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from mizzen_operator.api import child_names, labels, reasons
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
from mizzen_operator.resources import key_secrets
from mizzen_operator.resources.secret_data import annotation, read_value


@dataclass(frozen=True, slots=True)
class ServiceKeys:
    """Present keys of a service.

    Attributes:
        token: admin token of the service's gateway; empty if the gateway is shared.
        engine: public keys of the service's engines.
        created_at: creation time of the present generation, as Kubernetes writes it; empty if the keys were
            just created.
        handled_request: value of the rotate-keys annotation that was handled last.
        target_name: name by which gateways report the pair of the engine's and the gateway's newest keys.
        rotating: whether the service's own Secrets have a next generation.
        immutable_secret: name of a Secret that an older release made immutable; empty if it made none.
    """

    token: str
    engine: key_secrets.EngineKeys
    created_at: str
    handled_request: str
    target_name: str
    rotating: bool
    immutable_secret: str = ""


@dataclass(frozen=True, slots=True)
class RotationProgress:
    """Progress of a rotation.

    Attributes:
        generation: number of the newest generation.
        waiting_for: description of what the rotation waits for; empty once only the next keys are in use.
    """

    generation: int
    waiting_for: str


class KeyRotator:
    """Writes the Secrets of services, and advances rotations."""

    def __init__(
        self,
        kube: KubeClient,
        config: OperatorConfig,
        metrics: Metrics,
        record_key_time: Callable[[ServiceKey, str], None],
    ) -> None:
        """Create a rotator; it calls `record_key_time` with the creation time of a service's present keys."""
        self._kube = kube
        self._config = config
        self._metrics = metrics
        self._record_key_time = record_key_time

    def is_rotation_due(self, service: InferenceService, keys: ServiceKeys, now: datetime) -> bool:
        """Return whether a service's keys should be rotated: on request, or because of their age."""
        return not (keys.rotating or keys.immutable_secret) and is_rotation_due(
            service.rotate_keys, keys.handled_request, keys.created_at, self._config.rotate_keys_days, now
        )

    async def sync(self, service: InferenceService, gateway_public: tuple[str, ...] = ()) -> ServiceKeys:
        """Bring a service's Secrets to their desired state; begin a rotation if one is due.

        Args:
            service: owner of the Secrets.
            gateway_public: public keys of its shared gateway: the present one, and the next one during a
                rotation; empty if the gateway is dedicated.

        Raises:
            Refused: a Secret with a name that the service needs belongs to something else, or lacks a
                required value.
            KubeError: the API server failed, or a Secret was changed concurrently.
        """
        try:
            root = await self._root_secret(service)
            keys = _read_keys(root, gateway_public)
            if self.is_rotation_due(service, keys, datetime.now(UTC)):
                immutable_secret = await self._immutable_secret(service)
                if not immutable_secret:
                    new_keys = key_secrets.generate_keys(shared=service.shares_gateway)
                    now = timestamp(datetime.now(UTC))
                    patch = key_secrets.begin_rotation(root, new_keys, service.rotate_keys, now)
                    root = await patch_secret(self._kube, self._metrics, root, patch)
                keys = _read_keys(root, gateway_public, immutable_secret)
            for manifest in _mounted_secrets(service, root, gateway_public):
                live = await self._ensure_secret(service, manifest)
                patch = key_secrets.mounted_secret_patch(live, manifest, root)
                if patch is not None:
                    await patch_secret(self._kube, self._metrics, live, patch)
            return keys
        except ValueError as error:
            raise Refused(reasons.KEYS_UNUSABLE, str(error)) from error

    async def drop_previous(self, service: InferenceService) -> None:
        """Drop the previous generation of keys from the root Secret; `sync` then updates the mounted Secrets.

        Raises:
            Refused: the Secret belongs to something else.
            KubeError: the API server failed, or the Secret was changed concurrently.
        """
        root = await self._root_secret(service)
        if key_secrets.is_rotating(root):
            await patch_secret(self._kube, self._metrics, root, key_secrets.finish_rotation(root))

    async def _immutable_secret(self, service: InferenceService) -> str:
        """Return the name of a Secret that an older release made immutable; empty if all can be changed.

        Kubelets do not update the mounted files of an immutable Secret.
        """
        names = [child_names.root_keys_secret(service.name), child_names.engine_keys_secret(service.name)]
        if not service.shares_gateway:
            names.append(child_names.gateway_keys_secret(service.name))
        for name in names:
            live = await self._kube.get(ObjectRef("Secret", service.namespace, name))
            if live is not None and live.get("immutable"):
                return name
        return ""

    async def _root_secret(self, service: InferenceService) -> Mapping[str, Any]:
        """Return the Secret from which the mounted Secrets are derived.

        If it is missing, it is restored from the mounted Secrets, or created with new keys.
        """
        if not service.status and (created := await self._create(service, key_secrets.root_secret(service))):
            return created
        ref = ObjectRef("Secret", service.namespace, child_names.root_keys_secret(service.name))
        # Read once: if it were lost between two reads, it would be replaced by keys that fit no pod.
        if (live := await self._kube.get(ref)) is not None:
            return self._require_owned(service, live)
        names = [child_names.engine_keys_secret(service.name)]
        if not service.shares_gateway:
            names.append(child_names.gateway_keys_secret(service.name))
        mounted = [await self._kube.get(ObjectRef("Secret", service.namespace, name)) for name in names]
        owned = [secret for secret in mounted if secret is not None and is_owned_by(secret, service.uid)]
        if len(owned) < len(names):
            return await self._ensure_secret(service, key_secrets.root_secret(service))
        if service.shares_gateway:
            return await self._ensure_secret(
                service, key_secrets.restored_shared_root_secret(service, owned[0])
            )
        return await self._ensure_secret(service, key_secrets.restored_root_secret(service, *owned))

    async def _create(self, service: InferenceService, manifest: dict[str, Any]) -> Mapping[str, Any] | None:
        """Create a Secret and return it; return None if an object with its name exists."""
        if not await self._kube.create(manifest):
            return None
        self._metrics.actions.labels("CreateSecret").inc()
        self._record_time(service, manifest)
        return manifest

    async def _ensure_secret(self, service: InferenceService, manifest: dict[str, Any]) -> Mapping[str, Any]:
        """Return the Secret with a manifest's name; create it if it is missing."""
        ref = ObjectRef("Secret", service.namespace, manifest["metadata"]["name"])
        live = await self._kube.get(ref) if service.status else None
        if live is None:
            if created := await self._create(service, manifest):
                return created
            live = await self._kube.get(ref) or manifest
        return self._require_owned(service, live)

    def _require_owned(self, service: InferenceService, live: Mapping[str, Any]) -> Mapping[str, Any]:
        require_owned(service, live)
        self._record_time(service, live)
        return live

    def _record_time(self, service: InferenceService, secret: Mapping[str, Any]) -> None:
        """Record the creation time of a service's keys if `secret` is its root Secret."""
        if secret["metadata"]["name"] == child_names.root_keys_secret(service.name):
            self._record_key_time(
                ServiceKey(service.namespace, service.name), key_secrets.keys_created(secret)
            )


async def patch_secret(
    kube: KubeClient, metrics: Metrics, secret: Mapping[str, Any], patch: dict[str, Any]
) -> Mapping[str, Any]:
    """Patch a Secret if it is unchanged since it was read; return the patched Secret.

    Raises:
        KubeError: the API server failed, or the Secret was changed concurrently.
    """
    meta = secret["metadata"]
    metrics.actions.labels("PatchSecret").inc()
    ref = ObjectRef("Secret", meta["namespace"], meta["name"])
    await kube.patch(ref, patch)
    return await kube.get(ref) or key_secrets.apply_patch(secret, patch)


def rotation_progress(keys: ServiceKeys, groups: Sequence[Group], routing: RoutingState) -> RotationProgress:
    """Return how far gateways and engines have switched to the newest keys.

    A gateway or engine that is not ready reads its files before it becomes ready, so it is not waited for.
    """
    ready = [group for group in groups if group.live and group.containers_ready]
    target = frozenset((keys.target_name,))
    late = [group.name for group in ready if routing.engine_key_names.get(group.uid) != target]
    waiting_for = ""
    if not routing.ready_gateways:
        waiting_for = "a gateway that is ready"
    elif routing.reporting_gateways < routing.ready_gateways:
        waiting_for = f"{routing.ready_gateways - routing.reporting_gateways} gateways that do not answer"
    elif keys.target_name not in routing.key_names:
        waiting_for = "gateways that have not read the new keys yet"
    elif late:
        waiting_for = (
            f"{len(late)} of {len(ready)} groups that are not reached with the new keys alone: {late[0]}"
        )
    return RotationProgress(keys.engine.generation + (len(keys.engine.public) > 1), waiting_for)


def require_owned(service: InferenceService, live: Mapping[str, Any]) -> None:
    """Check that an object belongs to a service.

    Raises:
        Refused: the object belongs to something else.
    """
    if not is_owned_by(live, service.uid):
        raise name_taken_error(live, service.name)


def is_rotation_due(request: str, handled_request: str, created_at: str, days: float, now: datetime) -> bool:
    """Return whether keys should be rotated: because of a new request, or because of their age.

    Args:
        request: value of the rotate-keys annotation of the service.
        handled_request: value of that annotation at the last rotation.
        created_at: creation time of the keys, as Kubernetes writes it; empty if they were just created.
        days: maximum age of keys in days; 0 for no maximum.
        now: current time.
    """
    if request and request != handled_request:
        return True
    if not (days and created_at):
        return False
    return now - datetime.fromisoformat(created_at) > timedelta(days=days)


def _read_keys(
    root: Mapping[str, Any], gateway_public: tuple[str, ...], immutable_secret: str = ""
) -> ServiceKeys:
    engine = key_secrets.engine_keys(root)
    gateways = gateway_public or key_secrets.public_keys(root, labels.GATEWAY)
    return ServiceKeys(
        token="" if gateway_public else read_value(root, labels.ADMIN_TOKEN),
        engine=engine,
        created_at=key_secrets.keys_created(root),
        handled_request=annotation(root, labels.ROTATE_KEYS),
        target_name=key_secrets.connection_key_name(engine.public[-1], gateways[-1]),
        rotating=key_secrets.is_rotating(root),
        immutable_secret=immutable_secret,
    )


def _mounted_secrets(
    service: InferenceService, root: Mapping[str, Any], gateway_public: tuple[str, ...]
) -> list[dict[str, Any]]:
    if gateway_public:
        return [key_secrets.mounted_engine_secret(service, root, gateway_public)]
    return key_secrets.mounted_secrets(service, root)
