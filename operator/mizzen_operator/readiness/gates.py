# SPDX-License-Identifier: Apache-2.0
"""Writes the readiness gates of engine pods: `mizzen.dev/routable` and `mizzen.dev/verified`.

Each reconcile writes the gates that have changed, and continues with groups that have the new values. If a
spec no longer asks for verification, `mizzen.dev/verified` is set to True, so that no pod stays unready
because of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from mizzen_operator.api import labels, reasons
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.service_ref import ServiceRef
from mizzen_operator.api.types import InferenceService
from mizzen_operator.gateway_client.routing_table import RoutingState
from mizzen_operator.kube.client import STRATEGIC, KubeClient
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.objects import timestamp
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.pods.group import Group, format_verification_failure
from mizzen_operator.readiness.golden_prompts import Verifier
from mizzen_operator.rollout.spec_identity import has_failed_verification, verification_id


@dataclass(frozen=True, slots=True)
class _GateCondition:
    """A pod condition to write for one readiness gate."""

    type: str
    status: bool
    reason: str
    message: str | None = None
    """Message of the condition; None omits the field."""


class ReadinessGates:
    """Decides and writes the readiness gates of groups."""

    def __init__(self, kube: KubeClient, verifier: Verifier) -> None:
        self._kube = kube
        self._verifier = verifier

    async def update_routable(
        self, service: ServiceRef, groups: Sequence[Group], routing: RoutingState
    ) -> tuple[Group, ...]:
        """Write each gate `mizzen.dev/routable` that changes; return the groups with the new values.

        The returned groups also contain the gateways' reasons for not routing to them.

        Args:
            service: the service that owns the groups.
            groups: the observed groups.
            routing: routing state of the service's gateways.

        Raises:
            KubeError: the API server failed.
        """
        updated: list[Group] = []
        for group in groups:
            decision = decide_routable(group, routing)
            if decision is not None:
                value, reason = decision
                await self._write(service, group, _GateCondition(labels.ROUTABLE, value, reason))
                group = replace(group, routable=value, was_routable=True)
            updated.append(
                replace(
                    group,
                    routing_error=routing.problems.get(group.uid, ""),
                    protocol_mismatch=group.uid in routing.protocol_mismatches,
                )
            )
        return tuple(updated)

    async def update_verified(
        self,
        service: InferenceService,
        revision: str,
        groups: Sequence[Group],
        routing: RoutingState,
    ) -> tuple[Group, ...]:
        """Write verdicts on groups that await verification; return the groups with the new values.

        Args:
            service: the service that owns the groups.
            revision: revision of the spec; groups of other revisions are not verified.
            groups: the observed groups.
            routing: routing state of the gateways; it tells which groups they can send golden prompts to.

        Raises:
            KubeError: the API server failed.
        """
        key, verification = ServiceKey(service.namespace, service.name), verification_id(service)
        waiting = [
            group
            for group in groups
            if group.live and group.awaiting_verification and group.revision == revision
        ]
        askable = {
            group.uid
            for group in waiting
            if group.failed_verification != verification and group.uid in routing.verifying
        }
        if has_failed_verification(service, revision):
            askable = set()
        self._verifier.retain(key, askable if verification else ())
        return tuple(
            [
                await self._verify(service, group, verification, askable=group.uid in askable)
                if group in waiting
                else group
                for group in groups
            ]
        )

    async def _verify(
        self, service: InferenceService, group: Group, verification_id: str, *, askable: bool
    ) -> Group:
        """Write the verdict on one group, if there is one yet; return the group with the new values.

        `askable` says whether a gateway can send golden prompts to the group.
        """
        verification = service.rollout.verification
        if verification is None:  # the user has removed it from the spec
            return await self._open_verified(service, group, reasons.VERIFICATION_REMOVED)
        if not askable:
            return group
        key = ServiceKey(service.namespace, service.name)
        verdict = self._verifier.get_verdict(key, group.uid, verification_id, verification)
        if verdict is None:
            return group
        if not verdict.failure:
            return await self._open_verified(service, group, reasons.PASSED)
        message = format_verification_failure(verification_id, verdict.failure)
        await self._write(service, group, _GateCondition(labels.VERIFIED, False, reasons.REFUSED, message))
        return replace(group, failed_verification=verification_id, verification_error=verdict.failure)

    async def _open_verified(self, service: InferenceService, group: Group, reason: str) -> Group:
        await self._write(service, group, _GateCondition(labels.VERIFIED, True, reason, ""))
        return replace(
            group,
            awaiting_verification=False,
            verified=True,
            failed_verification="",
            verification_error="",
        )

    async def _write(self, service: ServiceRef, group: Group, gate: _GateCondition) -> None:
        condition = {
            "type": gate.type,
            "status": "True" if gate.status else "False",
            "reason": gate.reason,
            "lastTransitionTime": timestamp(datetime.now(UTC)),
        }
        if gate.message is not None:
            condition["message"] = gate.message
        patch = {"metadata": {"uid": group.uid}, "status": {"conditions": [condition]}}
        ref = ObjectRef("Pod", service.namespace, group.name, "status")
        try:
            await self._kube.patch(ref, patch, STRATEGIC)
        except KubeError as error:
            if error.code != 404:
                raise


def decide_routable(group: Group, routing: RoutingState) -> tuple[bool, str] | None:
    """Return the new value and reason of a group's gate `mizzen.dev/routable`; None if it does not change.

    The gate becomes True when every ready gateway routes to the group. It becomes False when the engine is
    not ready, or when at least one gateway reports its routes but no gateway reports a route to the group. So
    a gateway that has just started does not take away a group that other gateways use.
    """
    if not group.live:
        return None
    if group.routable:
        if not group.containers_ready:
            return False, reasons.ENGINE_NOT_READY
        if routing.reporting_gateways and group.uid not in routing.routed_by_some:
            return False, reasons.NO_GATEWAY_ROUTES
        return None
    if group.containers_ready and not group.awaiting_verification and group.uid in routing.routed_by_all:
        return True, reasons.GATEWAYS_ROUTE
    return None
