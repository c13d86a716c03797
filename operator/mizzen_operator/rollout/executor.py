# SPDX-License-Identifier: Apache-2.0
"""Creates and deletes the pods of groups as planned; called by the reconciler after the planner.

Repeating an action is safe: pod names are deterministic, and deletions have the uid as a precondition.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mizzen_operator.api import labels, reasons
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.keys.rotation import require_owned
from mizzen_operator.kube.apply import Applier
from mizzen_operator.kube.apply_cache import ApplyCache
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import REJECTION_CODES, KubeError, Refused
from mizzen_operator.kube.objects import is_owned_by
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.metrics import Metrics
from mizzen_operator.resources.engine_pod import engine_pods, ranks_service
from mizzen_operator.resources.field_origin import translate_message
from mizzen_operator.rollout.actions import Action, CreateGroup, DeleteGroup
from mizzen_operator.rollout.revisions import Revisions

logger = logging.getLogger(__name__)


class Executor:
    """Carries out the planner's actions."""

    def __init__(
        self,
        kube: KubeClient,
        config: OperatorConfig,
        *,
        metrics: Metrics,
        revisions: Revisions,
        applier: Applier,
        applied: ApplyCache,
    ) -> None:
        self._kube = kube
        self._config = config
        self._metrics = metrics
        self._revisions = revisions
        self._applier = applier
        self._applied = applied

    def foreign_pod_names(self, service: InferenceService) -> frozenset[str]:
        """Return pod names that a group needed but that are taken by pods without the service's label."""
        return frozenset(self._applied.record(service).foreign_pod_names)

    async def execute(
        self,
        service: InferenceService,
        newest: str,
        actions: Sequence[Action],
        avoided_nodes: Sequence[str] = (),
    ) -> None:
        """Create and delete groups, in the order of the plan.

        Once a pod is rejected, no further group of its revision is created; once the API server fails,
        no further group of any revision. Deletions are carried out even then: they do not depend on new
        groups, and a new group may be waiting for quota that a deletion releases.

        Args:
            service: the service that owns the groups.
            newest: revision of the current spec. Groups of other revisions are created from
                ControllerRevisions, without golden prompts, because those revisions have served before.
            actions: the planned actions.
            avoided_nodes: nodes on which pods of created groups must not run.

        Raises:
            Refused: the API server rejects a pod, for example because of its podTemplate or a quota.
            KubeError: the API server failed.
        """
        failure: Refused | KubeError | None = None
        rejected = set[str]()
        try:
            if service.pods > 1:
                await self._apply_ranks_service(service)
        except (Refused, KubeError) as error:
            failure = error
            rejected = {action.revision for action in actions if isinstance(action, CreateGroup)}
        for action in actions:
            if isinstance(action, DeleteGroup):
                await self._delete_group(service, action)
            elif action.revision not in rejected and not isinstance(failure, KubeError):
                try:
                    await self._create_group(service, newest, action, avoided_nodes)
                except (Refused, KubeError) as error:
                    failure = error
                    rejected.add(action.revision)
        if failure is not None:
            raise failure

    async def _delete_group(self, service: InferenceService, action: DeleteGroup) -> None:
        self._log(service, "delete", action)
        self._metrics.actions.labels("DeletePod").inc()
        for name, uid in action.pods:
            await self._kube.delete(ObjectRef("Pod", service.namespace, name), uid)

    async def _create_group(
        self, service: InferenceService, newest: str, action: CreateGroup, avoided_nodes: Sequence[str]
    ) -> None:
        self._log(service, "create", action)
        self._metrics.actions.labels("CreatePod").inc()
        if action.revision != newest:
            restored = await self._revisions.restore(service, action.revision)
            service = replace(restored, rollout=replace(restored.rollout, verification=None))
        pods = engine_pods(
            service,
            self._config,
            revision=action.revision,
            group=action.index,
            attempt=action.attempt,
            avoided_nodes=avoided_nodes,
        )
        if len(pods) > 1:
            await self._apply_ranks_service(service)
        for rank in action.ranks or range(len(pods)):
            try:
                created = await self._kube.create(pods[rank])
            except KubeError as error:
                if error.code in REJECTION_CODES:
                    raise _pod_rejection(service, pods[rank], error) from error
                raise
            if not created:
                await self._explain_taken_name(service, pods[rank]["metadata"]["name"], leads=rank == 0)

    def _log(self, service: InferenceService, verb: str, action: Action) -> None:
        logger.info(
            "%s/%s: %s pod %s (%s)", service.namespace, service.name, verb, action.name, action.reason
        )

    async def _apply_ranks_service(self, service: InferenceService) -> None:
        """Apply the headless Service for the DNS names of pods in multi-pod groups; it is never deleted."""
        digests, require = self._applied.record(service).digests, partial(require_owned, service)
        await self._applier.apply_or_delete([ranks_service(service)], digests, require, wanted=True)

    async def _explain_taken_name(self, service: InferenceService, name: str, *, leads: bool) -> None:
        """Raise an error that explains why a pod's name is taken, although no observed pod has it.

        The pod that has the name may have another owner, or a user may have removed its labels to take it out
        of service. If the name was meant for the group's leading pod, the next reconcile chooses another one.
        The names of the group's other pods are derived from the leading pod's name.

        Args:
            service: the service that owns the group.
            name: the name that is taken.
            leads: the name was meant for the group's leading pod.

        Raises:
            Refused: the name was meant for another pod of the group, and a foreign pod has it.
            KubeError: the name was meant for the leading pod, and the next reconcile will choose another one.
                Or the pod that has the name belongs to the group: the operator's previous leader has just
                created it, or it was created by a request whose response was lost.
        """
        selector = f"{labels.SERVICE}={service.name},{labels.COMPONENT}={labels.ENGINE}"
        pods = await self._kube.list_metadata(ObjectRef("Pod", service.namespace), selector)
        if any(pod["metadata"]["name"] == name and is_owned_by(pod, service.uid) for pod in pods):
            message = f"Pod {name} was created a moment ago, and is not in the store yet"
            raise KubeError(409, reasons.NOT_SEEN_YET, message)
        if not leads:
            message = f"Pod {name} belongs to something else: delete or rename it"
            raise Refused(reasons.NAME_TAKEN, message)
        self._applied.record(service).foreign_pod_names.add(name)
        message = f"Pod {name} does not belong to the service: another name will be used"
        raise KubeError(409, reasons.NAME_PASSED, message)


def _pod_rejection(service: InferenceService, pod: dict[str, Any], error: KubeError) -> Refused:
    """Return the error for a rejected pod; its message names fields of the service instead of the pod."""
    message = translate_message(service, pod, str(error))
    return Refused(reasons.POD_REJECTED, f"the API server rejects the pod: {message}")
