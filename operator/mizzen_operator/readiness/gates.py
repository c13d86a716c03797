"""Readiness gates of groups: whether gateways route to them, whether they answered golden prompts right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from mizzen_operator.api import labels
from mizzen_operator.api.key import Key
from mizzen_operator.api.service_ref import Subject
from mizzen_operator.api.types import InferenceService
from mizzen_operator.gateway_client.routing_table import Acknowledgements
from mizzen_operator.kube.client import STRATEGIC, Kube, KubeError, Ref
from mizzen_operator.kube.objects import stamp
from mizzen_operator.pods.group import Group, write_refusal
from mizzen_operator.readiness.golden_prompts import Verifier
from mizzen_operator.rollout import progress


class Gates:
    """Writes the conditions of groups' pods that follow from what gateways say."""

    def __init__(self, kube: Kube, verifier: Verifier) -> None:
        self._kube = kube
        self._verifier = verifier

    async def routable(
        self, service: Subject, groups: Sequence[Group], acknowledged: Acknowledgements
    ) -> tuple[Group, ...]:
        """Write the gates `mizzen.dev/routable` that changed; returns the groups as they are then.

        With them comes what keeps gateways from a group.

        Raises:
            KubeError: the API server failed.
        """
        found: list[Group] = []
        for group in groups:
            verdict = gate(group, acknowledged)
            if verdict is not None:
                value, reason = verdict
                await self._write(service, group, labels.ROUTABLE, value, reason)
                group = replace(group, routable=value, was_routable=True)
            problem, stranger = acknowledged.problems.get(group.uid, ""), group.uid in acknowledged.strangers
            found.append(replace(group, problem=problem, stranger=stranger))
        return tuple(found)

    async def verified(
        self,
        service: InferenceService,
        revision: str,
        groups: Sequence[Group],
        acknowledged: Acknowledgements,
    ) -> tuple[Group, ...]:
        """Write the verdicts on groups that are held back; returns the groups as they are then.

        Args:
            service: whose groups they are.
            revision: what its groups should run: those of another are not asked.
            groups: as they were seen.
            acknowledged: says which of them a gateway can ask.

        Raises:
            KubeError: the API server failed.
        """
        key, name = Key(service.namespace, service.name), progress.verification_name(service)
        held = [group for group in groups if group.live and group.held and group.revision == revision]
        asked = {g.uid for g in held if g.refused_by != name and g.uid in acknowledged.verifying}
        if progress.refused(service, revision):
            asked = set()
        self._verifier.keep(key, asked if name else ())
        return tuple(
            [
                await self._verdict(key, service, group, name, asked=group.uid in asked)
                if group in held
                else group
                for group in groups
            ]
        )

    async def _verdict(
        self, key: Key, service: InferenceService, group: Group, name: str, *, asked: bool
    ) -> Group:
        verification = service.rollout.verification
        if verification is None:  # it was taken out of the spec
            await self._write(service, group, labels.VERIFIED, True, "NotAsked")
            return replace(group, held=False, verified=True, refused_by="", refusal="")
        if not asked:
            return group
        verdict = self._verifier.verdict(key, group.uid, name, verification)
        if verdict is None:
            return group
        if not verdict.refusal:
            await self._write(service, group, labels.VERIFIED, True, "Passed")
            return replace(group, held=False, verified=True, refused_by="", refusal="")
        message = write_refusal(name, verdict.refusal)
        await self._write(service, group, labels.VERIFIED, False, "Refused", message)
        return replace(group, refused_by=name, refusal=verdict.refusal)

    async def _write(
        self,
        service: Subject,
        group: Group,
        kind: str,
        value: bool,
        reason: str,
        message: str = "",
    ) -> None:
        condition = {
            "type": kind,
            "status": "True" if value else "False",
            "reason": reason,
            "message": message,
            "lastTransitionTime": stamp(datetime.now(UTC)),
        }
        if not message and kind == labels.ROUTABLE:
            del condition["message"]
        patch = {"metadata": {"uid": group.uid}, "status": {"conditions": [condition]}}
        ref = Ref("Pod", service.namespace, group.name, "status")
        try:
            await self._kube.patch(ref, patch, STRATEGIC)
        except KubeError as error:
            if error.code != 404:
                raise


def gate(group: Group, acknowledged: Acknowledgements) -> tuple[bool, str] | None:
    """The value of `mizzen.dev/routable` and why, or None when it stays.

    It opens when every ready gateway routes to the group. It closes when the engine is not ready, or when no
    gateway that answers routes to it: a gateway that has only just started must not close what others use.
    """
    if not group.live:
        return None
    if group.routable:
        if not group.containers_ready:
            return False, "EngineNotReady"
        if acknowledged.answered and group.uid not in acknowledged.by_some:
            return False, "NoGatewayRoutes"
        return None
    if group.containers_ready and not group.held and group.uid in acknowledged.by_all:
        return True, "GatewaysRoute"
    return None
