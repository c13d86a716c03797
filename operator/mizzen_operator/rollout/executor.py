"""Does what was planned. Every step may be repeated: names are deterministic, deletions name the uid."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.api.key import Key
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.gateway.api_key_secrets import LabelledSecrets
from mizzen_operator.keys.rotation import KeyKeeper, Keys, require_ours
from mizzen_operator.kube.apply import Applier, Refused
from mizzen_operator.kube.client import Kube, KubeError, Ref
from mizzen_operator.kube.errors import REJECTED
from mizzen_operator.kube.objects import owned
from mizzen_operator.metrics import Metrics
from mizzen_operator.pods.observe import Observed
from mizzen_operator.resources.engine_pod import engine_pods, ranks_service
from mizzen_operator.resources.field_origin import in_words_of
from mizzen_operator.resources.gateway_deployment import gateway_account, gateway_manifests
from mizzen_operator.resources.gateway_spec import dedicated
from mizzen_operator.resources.network_policy import fetch_policy, policies
from mizzen_operator.resources.pod_disruption_budget import engine_budget, gateway_budget
from mizzen_operator.rollout.actions import Action, CreateGroup, DeleteGroup
from mizzen_operator.rollout.revisions import Revisions

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Checked:
    """Children that are not watched, as they were checked last.

    Attributes:
        passed: names of pods that are not free, though no pod with the service's label has them.
        progress: how far the service had come at the last look.
    """

    at: float
    keys: Keys | None = None
    shared: tuple[str, ...] = ()
    """Public keys of the shared gateway that the Secrets were made for."""
    digests: dict[tuple[str, str], str] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    progress: tuple[object, ...] = ()


class Executor:
    """Makes the cluster hold what the service needs.

    Children that nothing watches (Secrets, ServiceAccount, RoleBinding, policies, budgets) are checked once
    and then again after `resync_seconds`, after `recheck_seconds` while something does not run nor move, for
    it may lack one of them, or once there is a `doubt`. The rest is compared with what was observed.
    """

    def __init__(
        self,
        kube: Kube,
        config: OperatorConfig,
        metrics: Metrics,
        labelled: LabelledSecrets,
        revisions: Revisions,
        applier: Applier,
    ) -> None:
        self._kube = kube
        self._config = config
        self._metrics = metrics
        self._labelled = labelled
        self._revisions = revisions
        self._applier = applier
        self._keeper = KeyKeeper(kube, config, metrics)
        self._checked: dict[Key, tuple[str, _Checked]] = {}

    def forget(self, key: Key) -> None:
        """Drop what is remembered of a service."""
        self._checked.pop(key, None)
        self._revisions.forget(key)

    def doubt(self, key: Key, kind: str, name: str) -> None:
        """Compare one child of a service anew at the next look."""
        if key in self._checked:
            self._checked[key][1].digests.pop((kind, name), None)

    def refresh(self, service: InferenceService, observed: Observed) -> None:
        """Drop what is remembered of a service when it is too old for how the service is.

        What has moved since the last look lacks nothing for now, however late this one is: of a thousand
        services that come at once each would be compared anew when there is least time for it.
        """
        key = Key(service.namespace, service.name)
        if key not in self._checked:
            return
        memory = self._checked[key][1]
        moved, memory.progress = memory.progress != observed.progress, observed.progress
        trusted = observed.settled or moved
        limit = self._config.resync_seconds if trusted else self._config.recheck_seconds
        if time.monotonic() - memory.at > limit:
            self.forget(key)
            self._memory(service).progress = observed.progress

    def _memory(self, service: InferenceService) -> _Checked:
        key = Key(service.namespace, service.name)
        uid, memory = self._checked.get(key, ("", _Checked(0.0)))
        if uid != service.uid:
            memory = _Checked(time.monotonic())
            self._checked[key] = (service.uid, memory)
        return memory

    def passed(self, service: InferenceService) -> frozenset[str]:
        """Names that pods have which do not carry the service's label."""
        return frozenset(self._memory(service).passed)

    async def keys(self, service: InferenceService, shared: tuple[str, ...] = ()) -> Keys:
        """Make the service's Secrets where they are missing, and rotate their keys where that is due.

        Args:
            service: their owner.
            shared: the public keys of the gateway that it shares: the present one, and perhaps the next.

        Raises:
            Refused: a Secret of the name belongs to something else, or lacks what it should hold.
            KubeError: the API server failed.
        """
        memory = self._memory(service)
        known = memory.keys
        current = known is not None and not known.rotating and memory.shared == shared
        if known is not None and current and not self._keeper.due(service, known, datetime.now(UTC)):
            return known
        memory.keys, memory.shared = None, shared
        memory.keys = await self._keeper.sync(service, shared)
        return memory.keys

    async def drop_keys(self, service: InferenceService) -> None:
        """Drop the former generation of keys, which nobody uses any more.

        Raises:
            Refused: a Secret of the name belongs to something else.
            KubeError: the API server failed.
        """
        await self._keeper.finish(service)
        self._memory(service).keys = None

    async def gateway(self, service: InferenceService, observed: Observed) -> Mapping[str, Any]:
        """Apply what differs of the gateway's manifests; returns the Deployment as it is now.

        Raises:
            Refused: an object of one of the names belongs to something else.
            KubeError: the API server failed or found a manifest invalid.
        """
        seen = {"Deployment": observed.deployment, "Service": observed.endpoint}
        front = dedicated(service)
        front = replace(front, labelled=await self._labelled.find(front))
        digests, require = self._memory(service).digests, partial(require_ours, service)
        wanted, fresh = front.disruption_budgets, not service.status
        account = await self._applier.identity(gateway_account(front), digests, require, fresh=fresh)
        manifests = gateway_manifests(replace(front, account=account), self._config)
        live = await self._applier.apply(manifests, seen, digests, require, fresh=fresh)
        await self._applier.keep([gateway_budget(front)], digests, require, wanted=wanted, fresh=fresh)
        return live

    async def budget(self, service: InferenceService) -> None:
        """Apply the PodDisruptionBudget of the groups, or remove it where the spec asks for none.

        Raises:
            Refused: an object of the name belongs to something else.
            KubeError: the API server failed.
        """
        wanted = service.availability.disruption_budgets
        digests, require = self._memory(service).digests, partial(require_ours, service)
        fresh = not service.status
        await self._applier.keep([engine_budget(service)], digests, require, wanted=wanted, fresh=fresh)

    async def policies(self, service: InferenceService) -> None:
        """Apply the NetworkPolicies of a service, or remove them where the spec asks for none.

        Raises:
            Refused: an object of one of the names belongs to something else.
            KubeError: the API server failed.
        """
        digests, require = self._memory(service).digests, partial(require_ours, service)
        wanted, fresh, cached = service.network_policy, not service.status, service.access.cached
        manifests, fetch = policies(service, self._config), fetch_policy(service, self._config)
        await self._applier.keep(manifests, digests, require, wanted=wanted, fresh=fresh)
        fresh = fresh or not (cached or service.status.get("model"))
        await self._applier.keep([fetch], digests, require, wanted=wanted and cached, fresh=fresh)

    async def groups(self, service: InferenceService, newest: str, actions: Sequence[Action]) -> None:
        """Create and delete pods, in the order of the plan.

        Where a group is refused, no further one of its revision is tried; where the API server fails, none.
        Those go that shall go all the same: none of them waits for what is made, and what is made may wait
        for their place in a quota.

        Args:
            service: whose pods they are.
            newest: the revision of its spec as it is now; groups of another are made of what is recorded, and
                have served before: golden prompts are for those of the newest.
            actions: the plan.

        Raises:
            Refused: the API server does not take a pod as it is, for an invalid podTemplate or a quota.
            KubeError: the API server failed.
        """
        failure: Refused | KubeError | None = None
        refused = set[str]()
        try:
            if service.pods > 1:
                await self._names(service)
        except (Refused, KubeError) as error:
            failure = error
            refused = {action.revision for action in actions if isinstance(action, CreateGroup)}
        for action in actions:
            if isinstance(action, DeleteGroup):
                await self._delete(service, action)
            elif action.revision not in refused and not isinstance(failure, KubeError):
                try:
                    await self._make(service, newest, action)
                except (Refused, KubeError) as error:
                    failure = error
                    refused.add(action.revision)
        if failure is not None:
            raise failure

    async def _delete(self, service: InferenceService, action: DeleteGroup) -> None:
        self._log(service, "delete", action)
        self._metrics.actions.labels("DeletePod").inc()
        for name, uid in action.pods:
            await self._kube.delete(Ref("Pod", service.namespace, name), uid)

    async def _make(self, service: InferenceService, newest: str, action: CreateGroup) -> None:
        self._log(service, "create", action)
        self._metrics.actions.labels("CreatePod").inc()
        if action.revision != newest:
            at = await self._revisions.service_at(service, action.revision)
            service = replace(at, rollout=replace(at.rollout, verification=None))
        await self._create(service, action)

    def _log(self, service: InferenceService, what: str, action: Action) -> None:
        where = f"{service.namespace}/{service.name}"
        logger.info("%s: %s pod %s (%s)", where, what, action.name, action.reason)

    async def _create(self, service: InferenceService, action: CreateGroup) -> None:
        pods = engine_pods(
            service,
            self._config,
            revision=action.revision,
            group=action.group,
            incarnation=action.incarnation,
        )
        if len(pods) > 1:
            await self._names(service)
        for rank in action.ranks or range(len(pods)):
            if not await self._create_pod(service, pods[rank]):
                await self._explain(service, pods[rank]["metadata"]["name"], leads=rank == 0)

    async def _names(self, service: InferenceService) -> None:
        """Give the pods of groups their DNS names; they are kept when groups get by without."""
        digests, require = self._memory(service).digests, partial(require_ours, service)
        await self._applier.keep([ranks_service(service)], digests, require, wanted=True)

    async def _create_pod(self, service: InferenceService, pod: dict[str, Any]) -> bool:
        try:
            return await self._kube.create(pod)
        except KubeError as error:
            if error.code in REJECTED:
                words = in_words_of(service, pod, str(error))
                raise Refused("PodRejected", f"the API server rejects the pod: {words}") from error
            raise

    async def _explain(self, service: InferenceService, name: str, *, leads: bool) -> None:
        """Say why a pod's name was not free, although no pod with the service's labels was seen to have it.

        Another's pod may have it, or one of ours that somebody took out of service by its labels. The leading
        pod of a group takes the next name at the next look; the others are called by it.

        Raises:
            Refused: another pod of a group cannot have its name.
            KubeError: the next look has to find another name; or the pod was made a moment ago: by a leader
                that lost the Lease just then, or by a request whose answer was lost.
        """
        selector = f"{labels.SERVICE}={service.name},{labels.COMPONENT}={labels.ENGINE}"
        there = await self._kube.list_metadata(Ref("Pod", service.namespace), selector)
        if any(pod["metadata"]["name"] == name and owned(pod, service.uid) for pod in there):
            raise KubeError(409, "NotSeenYet", f"Pod {name} was made a moment ago, and is not seen yet")
        if not leads:
            raise Refused("NameTaken", f"Pod {name} belongs to something else: delete or rename it")
        self._memory(service).passed.add(name)
        raise KubeError(409, "NamePassed", f"Pod {name} is not the service's: the next name is taken")
