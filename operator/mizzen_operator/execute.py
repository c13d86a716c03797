"""Does what was planned. Every step may be repeated: names are deterministic, deletions name the uid."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mizzen_operator import labels
from mizzen_operator.api import InferenceService
from mizzen_operator.apply import Applier, Refused, name_taken
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube import Kube, KubeError, Ref
from mizzen_operator.labelled import LabelledSecrets
from mizzen_operator.metrics import Metrics
from mizzen_operator.observe import Observed, owned
from mizzen_operator.plan import Action, CreateGroup
from mizzen_operator.queue import Key
from mizzen_operator.render.budget import engine_budget, gateway_budget
from mizzen_operator.render.engine import engine_pod
from mizzen_operator.render.gateway import dedicated, gateway_manifests
from mizzen_operator.render.keys import (
    mounted_engine_keys,
    mounted_keys,
    public_key,
    read,
    require_equal,
    restored_engine_key,
    restored_keys,
    root_keys,
)
from mizzen_operator.render.policy import policies
from mizzen_operator.revisions import Revisions

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Checked:
    """Children that are not watched, as they were checked last."""

    at: float
    token: str = ""
    digests: dict[tuple[str, str], str] = field(default_factory=dict)


class Executor:
    """Makes the cluster hold what the service needs.

    Children that nothing watches (Secrets, ServiceAccount, RoleBinding) are checked once and then again after
    `resync_seconds`, or after `recheck_seconds` while something does not run, for it may lack one of them.
    The rest is compared with what was observed.
    """

    def __init__(
        self,
        kube: Kube,
        config: OperatorConfig,
        metrics: Metrics,
        labelled: LabelledSecrets,
        revisions: Revisions,
    ) -> None:
        self._kube = kube
        self._config = config
        self._metrics = metrics
        self._labelled = labelled
        self._revisions = revisions
        self._applier = Applier(kube, metrics)
        self._checked: dict[Key, tuple[str, _Checked]] = {}

    def forget(self, key: Key) -> None:
        """Drop what is remembered of a service."""
        self._checked.pop(key, None)
        self._revisions.forget(key)

    def refresh(self, service: InferenceService, *, settled: bool) -> None:
        """Drop what is remembered of a service when it is too old for how the service is."""
        key = Key(service.namespace, service.name)
        limit = self._config.resync_seconds if settled else self._config.recheck_seconds
        if key in self._checked and time.monotonic() - self._checked[key][1].at > limit:
            self.forget(key)

    def _memory(self, service: InferenceService) -> _Checked:
        key = Key(service.namespace, service.name)
        uid, memory = self._checked.get(key, ("", _Checked(0.0)))
        if uid != service.uid:
            memory = _Checked(time.monotonic())
            self._checked[key] = (service.uid, memory)
        return memory

    async def keys(self, service: InferenceService) -> str:
        """Make the service's Secrets where they are missing; returns the admin token.

        Raises:
            Refused: a Secret of the name belongs to something else, or lacks what it should hold.
            KubeError: the API server failed.
        """
        memory = self._memory(service)
        if memory.token:
            return memory.token
        try:
            root = await self._root(service)
            for manifest in mounted_keys(service, root):
                require_equal(await self._secret(service, manifest), manifest, root)
            memory.token = read(root, labels.ADMIN_TOKEN)
        except ValueError as error:
            raise Refused("KeysUnusable", str(error)) from error
        return memory.token

    async def engine_keys(self, service: InferenceService, gateway: str) -> str:
        """Make the Secrets of a service that shares a gateway; returns the public key of its engines.

        Args:
            service: their owner.
            gateway: the public key of the shared gateway.

        Raises:
            Refused: a Secret of the name belongs to something else, or does not match.
            KubeError: the API server failed.
        """
        memory = self._memory(service)
        if memory.token:
            return memory.token
        try:
            root = await self._root(service)
            manifest = mounted_engine_keys(service, root, gateway)
            require_equal(await self._secret(service, manifest), manifest, root)
            memory.token = public_key(read(root, "engine.secret"))
        except ValueError as error:
            raise Refused("KeysUnusable", str(error)) from error
        return memory.token

    async def _root(self, service: InferenceService) -> Mapping[str, Any]:
        """The Secret that the others follow from; when it is lost, it is made of those that are left."""
        if not service.status and (made := await self._made(service, root_keys(service))):
            return made
        ref = Ref("Secret", service.namespace, labels.root_keys(service.name))
        if await self._kube.get(ref) is not None:
            return await self._secret(service, root_keys(service))
        names = [labels.engine_keys(service.name)]
        if not service.shared:
            names.append(labels.gateway_keys(service.name))
        mounted = [await self._kube.get(Ref("Secret", service.namespace, name)) for name in names]
        left = [secret for secret in mounted if secret is not None and owned(secret, service.uid)]
        if len(left) < len(names):
            return await self._secret(service, root_keys(service))
        if service.shared:
            return await self._secret(service, restored_engine_key(service, left[0]))
        return await self._secret(service, restored_keys(service, *left))

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
        require_ours(service, live)
        self._keys_made(service, live)
        return live

    def _keys_made(self, service: InferenceService, secret: Mapping[str, Any]) -> None:
        """Note the age of the Secret that a service's keys follow from."""
        meta = secret["metadata"]
        if meta["name"] == labels.root_keys(service.name):
            key = Key(service.namespace, service.name)
            self._metrics.fleet.keys_made(key, meta.get("creationTimestamp", ""))

    async def gateway(self, service: InferenceService, observed: Observed) -> Mapping[str, Any]:
        """Apply what differs of the gateway's manifests; returns the Deployment as it is now.

        Raises:
            Refused: an object of one of the names belongs to something else.
            KubeError: the API server failed or found a manifest invalid.
        """
        seen = {"Deployment": observed.deployment, "Service": observed.endpoint}
        front = dedicated(service)
        front = replace(front, labelled=await self._labelled.find(front))
        manifests = gateway_manifests(front, self._config)
        digests = self._memory(service).digests
        require = partial(require_ours, service)
        live = await self._applier.apply(manifests, seen, digests, require)
        await self._applier.keep([gateway_budget(front)], digests, require, wanted=front.disruption_budgets)
        return live

    async def budget(self, service: InferenceService) -> None:
        """Apply the PodDisruptionBudget of the groups, or remove it where the spec asks for none.

        Raises:
            Refused: an object of the name belongs to something else.
            KubeError: the API server failed.
        """
        wanted = service.availability.disruption_budgets
        digests, require = self._memory(service).digests, partial(require_ours, service)
        await self._applier.keep([engine_budget(service)], digests, require, wanted=wanted)

    async def policies(self, service: InferenceService) -> None:
        """Apply the NetworkPolicies of a service, or remove them where the spec asks for none.

        Raises:
            Refused: an object of one of the names belongs to something else.
            KubeError: the API server failed.
        """
        digests, require = self._memory(service).digests, partial(require_ours, service)
        wanted = service.network_policy
        await self._applier.keep(policies(service, self._config), digests, require, wanted=wanted)

    async def groups(self, service: InferenceService, newest: str, actions: Sequence[Action]) -> None:
        """Create and delete pods, in the order of the plan.

        Args:
            service: whose pods they are.
            newest: the revision of its spec as it is now; groups of another are made of what is recorded.
            actions: the plan.

        Raises:
            Refused: the API server does not take a pod as it is, for an invalid podTemplate or a quota.
            KubeError: the API server failed.
        """
        for action in actions:
            made = isinstance(action, CreateGroup)
            logger.info(
                "%s/%s: %s pod %s (%s)",
                service.namespace,
                service.name,
                "create" if made else "delete",
                action.name,
                action.reason,
            )
            self._metrics.actions.labels("CreatePod" if made else "DeletePod").inc()
            if isinstance(action, CreateGroup):
                former = action.revision != newest
                at = await self._revisions.service_at(service, action.revision) if former else service
                await self._create(at, action)
            else:
                await self._kube.delete(Ref("Pod", service.namespace, action.name), action.uid)

    async def _create(self, service: InferenceService, action: CreateGroup) -> None:
        pod = engine_pod(
            service,
            self._config,
            revision=action.revision,
            group=action.group,
            incarnation=action.incarnation,
        )
        try:
            made = await self._kube.create(pod)
        except KubeError as error:
            if error.code in (400, 403, 422):
                raise Refused("PodRejected", f"the API server rejects the pod: {error}") from error
            raise
        if (
            not made
        ):  # pods with the service's label were seen; a leader that just lost the Lease made this one
            raise Refused("NameTaken", f"Pod {action.name} belongs to something else: delete or rename it")


def require_ours(service: InferenceService, live: Mapping[str, Any]) -> None:
    """Check that an object belongs to a service.

    Raises:
        Refused: it does not.
    """
    if not owned(live, service.uid):
        raise name_taken(live)
