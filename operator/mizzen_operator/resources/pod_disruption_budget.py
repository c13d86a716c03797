"""PodDisruptionBudgets of groups and gateways.

Both count pods (`minAvailable` as a number), for pods of groups have no controller whose scale the disruption
controller would know. A pod counts while it is ready, and a group's leading pod is ready while gateways route
to it. Of groups of several pods all pods count: one that is evicted takes its group along.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.types import InferenceService
from mizzen_operator.resources.gateway_spec import Front
from mizzen_operator.resources.metadata import metadata, stamped

KIND = "PodDisruptionBudget"


def least(pods: int, unavailable: int) -> int:
    """How many of `pods` an eviction must leave: of several one may always go, of one alone none."""
    if pods > 1:
        unavailable = max(1, unavailable)
    return max(0, pods - unavailable)


def engine_budget(service: InferenceService) -> dict[str, Any]:
    """The budget of a service's groups."""
    selector = {labels.SERVICE: service.name, labels.COMPONENT: labels.ENGINE}
    number = least(service.groups, service.rollout.unavailable_groups(service.groups))
    if service.pods == 1:
        selector[labels.RANK] = "0"
    elif number < service.groups:
        number = (number + 1) * service.pods - 1  # one pod of the last group that may go
    else:
        number *= service.pods
    name = child_names.engine_disruption_budget(service.name)
    return _budget(metadata(service, name, labels.ENGINE), number, selector)


def gateway_budget(front: Front) -> dict[str, Any]:
    """The budget of a gateway's pods."""
    return _budget(front.metadata(), least(front.gateway.replicas, 0), front.selector)


def _budget(meta: dict[str, Any], number: int, selector: Mapping[str, str]) -> dict[str, Any]:
    manifest = {
        "apiVersion": "policy/v1",
        "kind": KIND,
        "metadata": meta,
        "spec": {
            "minAvailable": number,
            "selector": {"matchLabels": dict(selector)},
            # What does not work anyway must not hold up a node that is drained.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
    return stamped(manifest)
