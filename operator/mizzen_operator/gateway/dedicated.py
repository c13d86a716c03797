# SPDX-License-Identifier: Apache-2.0
"""Applies the gateway that serves a single InferenceService. `reconcile.py` calls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.gateway.api_key_secrets import ApiKeySecrets
from mizzen_operator.keys.rotation import require_owned
from mizzen_operator.kube.apply import Applier
from mizzen_operator.kube.apply_cache import ApplyCache
from mizzen_operator.pods.observe import ObservedState
from mizzen_operator.resources.gateway_deployment import gateway_account, gateway_manifests
from mizzen_operator.resources.gateway_spec import dedicated_gateway_spec
from mizzen_operator.resources.pod_disruption_budget import gateway_disruption_budget


class DedicatedGateways:
    """Applies the gateways of services that do not share a gateway."""

    def __init__(
        self, config: OperatorConfig, api_key_secrets: ApiKeySecrets, applier: Applier, applied: ApplyCache
    ) -> None:
        self._config = config
        self._api_key_secrets = api_key_secrets
        self._applier = applier
        self._applied = applied

    async def apply(self, service: InferenceService, observed: ObservedState) -> Mapping[str, Any]:
        """Apply the gateway's manifests that differ from the live objects; return the live Deployment.

        Raises:
            Refused: an object with a name that the gateway needs belongs to something else, or the operator
                may not list Secrets.
            KubeError: the API server failed, or rejected a manifest.
        """
        live_objects = {"Deployment": observed.deployment, "Service": observed.gateway_service}
        spec = dedicated_gateway_spec(service)
        spec = replace(spec, labelled_secrets=await self._api_key_secrets.find(spec))
        digests, require = self._applied.record(service).digests, partial(require_owned, service)
        wanted, fresh = spec.disruption_budgets, not service.status
        account = await self._applier.apply_and_get_uid(
            gateway_account(spec), digests, require, assume_absent=fresh
        )
        manifests = gateway_manifests(replace(spec, service_account_uid=account), self._config)
        live = await self._applier.apply(manifests, live_objects, digests, require, assume_absent=fresh)
        await self._applier.apply_or_delete(
            [gateway_disruption_budget(spec)], digests, require, wanted=wanted, assume_absent=fresh
        )
        return live
