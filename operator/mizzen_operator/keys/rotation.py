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
from mizzen_operator.gateway_client.routing_table import Acknowledgements
from mizzen_operator.kube.apply import name_taken
from mizzen_operator.kube.client import Kube
from mizzen_operator.kube.errors import Refused
from mizzen_operator.kube.objects import owned, stamp
from mizzen_operator.kube.refs import Ref
from mizzen_operator.metrics import Metrics
from mizzen_operator.pods.group import Group
from mizzen_operator.resources import key_secrets as render
from mizzen_operator.resources.secret_data import annotation, read


@dataclass(frozen=True, slots=True)
class Keys:
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
    engine: render.EngineKeys
    made: str
    asked: str
    target: str
    rotating: bool
    frozen: str = ""


@dataclass(frozen=True, slots=True)
class Rotation:
    """How far a rotation is.

    Attributes:
        waits: whom it waits for, in words; empty once all use the next keys alone.
    """

    generation: int
    waits: str


class KeyKeeper:
    """Makes the Secrets of services, and what a rotation changes of them."""

    def __init__(
        self,
        kube: Kube,
        config: OperatorConfig,
        metrics: Metrics,
        record_key_time: Callable[[ServiceKey, str], None],
    ) -> None:
        """Write Secrets; `record_key_time` gets the time at which each service's present keys were made."""
        self._kube = kube
        self._config = config
        self._metrics = metrics
        self._record_key_time = record_key_time

    def due(self, service: InferenceService, keys: Keys, now: datetime) -> bool:
        """Whether a service's keys should be rotated: it is asked for, or they are too old."""
        return not (keys.rotating or keys.frozen) and due(
            service.rotate_keys, keys.asked, keys.made, self._config.rotate_keys_days, now
        )

    async def sync(self, service: InferenceService, shared: tuple[str, ...] = ()) -> Keys:
        """Make the service's Secrets what they should be; begin a rotation where one is due.

        Args:
            service: their owner.
            shared: the public keys of the gateway that it shares: the present one, and perhaps the next.

        Raises:
            Refused: a Secret of the name belongs to something else, or lacks what it should hold.
            KubeError: the API server failed, or somebody else changed a Secret at the same time.
        """
        try:
            root = await self._root(service)
            keys = _keys(root, shared)
            if self.due(service, keys, datetime.now(UTC)):
                frozen = await self._frozen(service)
                if not frozen:
                    given, now = render.fresh(shared=service.shared), stamp(datetime.now(UTC))
                    patch = render.begin(root, given, service.rotate_keys, now)
                    root = await change_secret(self._kube, self._metrics, root, patch)
                keys = _keys(root, shared, frozen)
            for manifest in _mounted(service, root, shared):
                live = await self._secret(service, manifest)
                patch = render.corrected(live, manifest, root)
                if patch is not None:
                    await change_secret(self._kube, self._metrics, live, patch)
            return keys
        except ValueError as error:
            raise Refused("KeysUnusable", str(error)) from error

    async def finish(self, service: InferenceService) -> None:
        """Drop the former generation. The Secrets that pods mount follow with the next `sync`.

        Raises:
            Refused: the Secret belongs to something else.
            KubeError: the API server failed, or somebody else changed the Secret at the same time.
        """
        root = await self._root(service)
        if render.rotating(root):
            await change_secret(self._kube, self._metrics, root, render.finish(root))

    async def _frozen(self, service: InferenceService) -> str:
        """A Secret of the service that an older release made immutable; kubelet would not follow it."""
        names = [child_names.root_keys_secret(service.name), child_names.engine_keys_secret(service.name)]
        if not service.shared:
            names.append(child_names.gateway_keys_secret(service.name))
        for name in names:
            live = await self._kube.get(Ref("Secret", service.namespace, name))
            if live is not None and live.get("immutable"):
                return name
        return ""

    async def _root(self, service: InferenceService) -> Mapping[str, Any]:
        """The Secret that the others follow from; when it is lost, it is made of those that are left."""
        if not service.status and (made := await self._made(service, render.root_keys(service))):
            return made
        ref = Ref("Secret", service.namespace, child_names.root_keys_secret(service.name))
        # Read once: if it were lost between two reads, keys that fit nobody's would be made in its place.
        if (live := await self._kube.get(ref)) is not None:
            return self._ours(service, live)
        names = [child_names.engine_keys_secret(service.name)]
        if not service.shared:
            names.append(child_names.gateway_keys_secret(service.name))
        mounted = [await self._kube.get(Ref("Secret", service.namespace, name)) for name in names]
        left = [secret for secret in mounted if secret is not None and owned(secret, service.uid)]
        if len(left) < len(names):
            return await self._secret(service, render.root_keys(service))
        if service.shared:
            return await self._secret(service, render.restored_engine_key(service, left[0]))
        return await self._secret(service, render.restored_keys(service, *left))

    async def _made(self, service: InferenceService, manifest: dict[str, Any]) -> Mapping[str, Any] | None:
        """Create a Secret; None when one of its name is there."""
        if not await self._kube.create(manifest):
            return None
        self._metrics.actions.labels("CreateSecret").inc()
        self._keys_made(service, manifest)
        return manifest

    async def _secret(self, service: InferenceService, manifest: dict[str, Any]) -> Mapping[str, Any]:
        """The Secret of a manifest's name; made when it is missing, which it is while a service is new."""
        ref = Ref("Secret", service.namespace, manifest["metadata"]["name"])
        live = await self._kube.get(ref) if service.status else None
        if live is None:
            if made := await self._made(service, manifest):
                return made
            live = await self._kube.get(ref) or manifest
        return self._ours(service, live)

    def _ours(self, service: InferenceService, live: Mapping[str, Any]) -> Mapping[str, Any]:
        require_ours(service, live)
        self._keys_made(service, live)
        return live

    def _keys_made(self, service: InferenceService, secret: Mapping[str, Any]) -> None:
        """Note the age of the keys in the Secret that a service's others follow from."""
        if secret["metadata"]["name"] == child_names.root_keys_secret(service.name):
            self._record_key_time(ServiceKey(service.namespace, service.name), render.made(secret))


async def change_secret(
    kube: Kube, metrics: Metrics, secret: Mapping[str, Any], patch: dict[str, Any]
) -> Mapping[str, Any]:
    """Change a Secret that is still as it was read; the Secret as it is then.

    Raises:
        KubeError: the API server failed, or somebody else changed the Secret at the same time.
    """
    meta = secret["metadata"]
    metrics.actions.labels("PatchSecret").inc()
    ref = Ref("Secret", meta["namespace"], meta["name"])
    await kube.patch(ref, patch)
    return await kube.get(ref) or render.applied(secret, patch)


def rotation(keys: Keys, groups: Sequence[Group], heard: Acknowledgements) -> Rotation:
    """How far all who are to use the newest keys do, and nothing else.

    A gateway or engine that is not ready reads its files before it is, and needs no waiting for.
    """
    ready = [group for group in groups if group.live and group.containers_ready]
    late = [group.name for group in ready if heard.keys.get(group.uid) != frozenset((keys.target,))]
    waits = ""
    if not heard.asked:
        waits = "a gateway that is ready"
    elif heard.answered < heard.asked:
        waits = f"{heard.asked - heard.answered} gateways that do not answer"
    elif keys.target not in heard.known:
        waits = "gateways that have not read them yet"
    elif late:
        waits = f"{len(late)} of {len(ready)} groups that are not reached with them alone yet: {late[0]}"
    return Rotation(keys.engine.generation + (len(keys.engine.public) > 1), waits)


def require_ours(service: InferenceService, live: Mapping[str, Any]) -> None:
    """Check that an object belongs to a service.

    Raises:
        Refused: it does not.
    """
    if not owned(live, service.uid):
        raise name_taken(live, service.name)


def due(wish: str, obeyed: str, made: str, days: float, now: datetime) -> bool:
    """Whether keys should be rotated: it is asked for and was not obeyed yet, or they are too old."""
    if wish and wish != obeyed:
        return True
    if not (days and made):
        return False
    return now - datetime.fromisoformat(made) > timedelta(days=days)


def _keys(root: Mapping[str, Any], shared: tuple[str, ...], frozen: str = "") -> Keys:
    engine = render.engine_keys(root)
    gateways = shared or render.public_keys(root, labels.GATEWAY)
    return Keys(
        token="" if shared else read(root, labels.ADMIN_TOKEN),
        engine=engine,
        made=render.made(root),
        asked=annotation(root, labels.ROTATE_KEYS),
        target=render.name_of(engine.public[-1], gateways[-1]),
        rotating=render.rotating(root),
        frozen=frozen,
    )


def _mounted(
    service: InferenceService, root: Mapping[str, Any], shared: tuple[str, ...]
) -> list[dict[str, Any]]:
    if shared:
        return [render.mounted_engine_keys(service, root, shared)]
    return render.mounted_keys(service, root)
