# SPDX-License-Identifier: Apache-2.0
"""Reads a shared gateway without updating it. `shared.py` uses it while the spec of a co-owner is invalid.

A co-owner is a service that the live gateway serves; without its spec, the gateway's settings are unknown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mizzen_operator.api import child_names, labels, reasons
from mizzen_operator.api.gateway_sharing import GatewaySharing
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import BlockingReason, Refused
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.resources.key_secrets import public_keys
from mizzen_operator.resources.secret_data import read_value


@dataclass(frozen=True, slots=True)
class SharedGateway:
    """A shared gateway after its reconcile.

    Attributes:
        sharing: services of the gateway, and the model names of each.
        deployment: live Deployment.
        public_keys: public CURVE keys of the gateway: the present one, and the next one during a rotation.
        token: token of the gateway's admin API.
        changed: whether services or settings have changed since the previous reconcile.
        failure: why the services' specs could not be applied to the gateway, which then serves as before;
            None if they were applied.
        affected: names of the services that the failure concerns; None if it concerns all services.
    """

    sharing: GatewaySharing
    deployment: Mapping[str, Any]
    public_keys: tuple[str, ...]
    token: str
    changed: bool
    failure: BlockingReason | None = None
    affected: frozenset[str] | None = None

    def failure_for(self, service: str) -> BlockingReason | None:
        """Return why a service's spec could not be applied to the gateway; None if it was applied."""
        return self.failure if self.affected is None or service in self.affected else None


class SharedGatewayReader:
    """Reads shared gateways without changing them."""

    def __init__(self, kube: KubeClient) -> None:
        self._kube = kube

    async def read_unchanged(
        self,
        namespace: str,
        deployment: Mapping[str, Any],
        sharing: GatewaySharing,
        invalid_names: Sequence[str],
    ) -> SharedGateway:
        """Return a namespace's shared gateway without updating it.

        Args:
            namespace: namespace of the gateway.
            deployment: live Deployment.
            sharing: services that share the gateway and have a valid spec.
            invalid_names: names of the services that the gateway serves although their spec is invalid.

        Raises:
            Refused: the gateway's Secret is missing, or lacks a value.
            KubeError: the API server failed.
        """
        secret = await self._kube.get(ObjectRef("Secret", namespace, child_names.SHARED_GATEWAY))
        config = await self._kube.get(ObjectRef("ConfigMap", namespace, child_names.SHARED_GATEWAY))
        try:
            live = secret or {"metadata": {"name": child_names.SHARED_GATEWAY}, "data": {}}
            public, token = public_keys(live, labels.GATEWAY), read_value(live, labels.ADMIN_TOKEN)
        except ValueError as error:
            raise Refused(reasons.KEYS_UNUSABLE, str(error)) from error
        served = _served_models(config or {})
        wanted = {
            service.name: (list(sharing.model_names[service.name]), service.suspend)
            for service in sharing.services
        }
        failure = BlockingReason(
            reasons.NEIGHBOUR_INVALID,
            f"InferenceService {', '.join(invalid_names)}, which has the same gateway, cannot be read; until "
            "it can, the gateway stays as it is: see its condition Failed, or delete it",
        )
        affected = frozenset(name for name, entry in wanted.items() if served.get(name) != entry)
        return SharedGateway(
            sharing,
            deployment,
            public_keys=public,
            token=token,
            changed=False,
            failure=failure,
            affected=affected,
        )


def live_owner_names(live: Mapping[str, Any] | None, services: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the services that co-own an object and are not being deleted."""
    references = live["metadata"].get("ownerReferences", []) if live is not None else []
    uids = {reference["uid"] for reference in references}
    metas = [body["metadata"] for body in services]
    return [meta["name"] for meta in metas if meta["uid"] in uids and "deletionTimestamp" not in meta]


def _served_models(config: Mapping[str, Any]) -> dict[str, tuple[list[str], bool]]:
    """Return the services in a ConfigMap, by name.

    Each value is the service's model names, and whether the service is suspended.
    """
    content = config.get("data", {}).get(labels.SERVICES_FILE)
    entries: list[dict[str, Any]] = json.loads(content)["services"] if content else []
    return {entry["name"]: (entry["models"], entry["suspended"]) for entry in entries}
