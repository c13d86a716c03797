# SPDX-License-Identifier: Apache-2.0
"""Builds the PodDisruptionBudgets of groups and gateways.

Both set `minAvailable` to a number of pods, not to a percentage: the disruption controller would compute a
percentage from the scale of the pods' controller, and the pods of groups have no such controller. A pod
counts while it is ready; a group's leading pod is ready while gateways route to it. All pods of a multi-pod
group count, because the eviction of one of them ends the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.types import InferenceService
from mizzen_operator.resources.gateway_spec import GatewaySpec
from mizzen_operator.resources.metadata import metadata, with_applied_hash

KIND = "PodDisruptionBudget"


def min_available(pods: int, unavailable: int) -> int:
    """Return the value of `minAvailable` for `pods` pods; of several pods, at least one may be evicted.

    Args:
        pods: number of pods.
        unavailable: number of pods that the spec allows to be missing.
    """
    if pods > 1:
        unavailable = max(1, unavailable)
    return max(0, pods - unavailable)


def engine_disruption_budget(service: InferenceService) -> dict[str, Any]:
    """Return the budget of a service's groups."""
    selector = {labels.SERVICE: service.name, labels.COMPONENT: labels.ENGINE}
    number = min_available(service.groups, service.rollout.unavailable_groups(service.groups))
    if service.pods == 1:
        selector[labels.RANK] = "0"
    elif number < service.groups:
        number = (number + 1) * service.pods - 1  # allows the eviction of one pod of one group
    else:
        number *= service.pods
    name = child_names.engine_disruption_budget(service.name)
    return _budget(metadata(service, name, labels.ENGINE), number, selector)


def gateway_disruption_budget(spec: GatewaySpec) -> dict[str, Any]:
    """Return the budget of a gateway's pods."""
    return _budget(spec.metadata(), min_available(spec.gateway.replicas, 0), spec.selector)


def _budget(meta: dict[str, Any], number: int, selector: Mapping[str, str]) -> dict[str, Any]:
    manifest = {
        "apiVersion": "policy/v1",
        "kind": KIND,
        "metadata": meta,
        "spec": {
            "minAvailable": number,
            "selector": {"matchLabels": dict(selector)},
            # Pods that are not ready must not block a node drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
    return with_applied_hash(manifest)
