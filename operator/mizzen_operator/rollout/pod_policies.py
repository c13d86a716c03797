# SPDX-License-Identifier: Apache-2.0
"""Applies NetworkPolicies and the engines' PodDisruptionBudget, before the pods that they select exist."""

from __future__ import annotations

from functools import partial

from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.keys.rotation import require_owned
from mizzen_operator.kube.apply import Applier
from mizzen_operator.kube.apply_cache import ApplyCache
from mizzen_operator.resources.network_policy import fetch_network_policy, service_network_policies
from mizzen_operator.resources.pod_disruption_budget import engine_disruption_budget


class PodPolicies:
    """Applies the policies for pods of all services."""

    def __init__(self, config: OperatorConfig, applier: Applier, applied: ApplyCache) -> None:
        self._config = config
        self._applier = applier
        self._applied = applied

    async def apply_network_policies(self, service: InferenceService) -> None:
        """Apply the NetworkPolicies of a service, or delete them if the spec does not enable them.

        Raises:
            Refused: an object with the name of a policy exists, but does not belong to the service.
            KubeError: the API server failed.
        """
        digests, require = self._applied.record(service).digests, partial(require_owned, service)
        wanted, fresh, cached = service.network_policy, not service.status, service.access.cached
        manifests, fetch = (
            service_network_policies(service, self._config),
            fetch_network_policy(service, self._config),
        )
        await self._applier.apply_or_delete(manifests, digests, require, wanted=wanted, assume_absent=fresh)
        fresh = fresh or not (cached or service.status.get("model", {}).get("place"))
        await self._applier.apply_or_delete(
            [fetch], digests, require, wanted=wanted and cached, assume_absent=fresh
        )

    async def apply_disruption_budget(self, service: InferenceService) -> None:
        """Apply the PodDisruptionBudget of a service's groups, or delete it if the spec does not enable it.

        Raises:
            Refused: an object with the name of the budget exists, but does not belong to the service.
            KubeError: the API server failed.
        """
        wanted = service.availability.disruption_budgets
        digests, require = self._applied.record(service).digests, partial(require_owned, service)
        fresh = not service.status
        await self._applier.apply_or_delete(
            [engine_disruption_budget(service)], digests, require, wanted=wanted, assume_absent=fresh
        )
