"""A shared gateway that stays as it is, for one of those whom it serves cannot be read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.gateway_sharing import GatewaySharing
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import BlockingReason, Refused
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.resources.key_secrets import public_keys
from mizzen_operator.resources.secret_data import read


@dataclass(frozen=True, slots=True)
class SharedGateway:
    """A shared gateway as it is now.

    Attributes:
        sharing: who has what.
        deployment: its Deployment as it is now.
        public: its CURVE keys: the present one, and perhaps the next.
        token: of its admin API.
        changed: the services or settings are others than at the last look.
        failure: why it is not as they ask for; as it was before, it serves on.
        left_out: names of the services whom alone the failure concerns; None where it concerns all.
    """

    sharing: GatewaySharing
    deployment: Mapping[str, Any]
    public_keys: tuple[str, ...]
    token: str
    changed: bool
    failure: BlockingReason | None = None
    affected: frozenset[str] | None = None

    def failure_for(self, service: str) -> BlockingReason | None:
        """Why the gateway is not as a service asks for; None when it is."""
        return self.failure if self.affected is None or service in self.affected else None


class SharedGatewayReader:
    """Reads shared gateways without changing them."""

    def __init__(self, kube: KubeClient) -> None:
        self._kube = kube

    async def read(
        self, namespace: str, deployment: Mapping[str, Any], sharing: GatewaySharing, invalid_names: Sequence[str]
    ) -> SharedGateway:
        """A namespace's gateway as it is.

        Args:
            namespace: whose gateway it is.
            deployment: its Deployment.
            sharing: the services that can be read.
            invalid_names: names of those that cannot, and that it serves.

        Raises:
            Refused: its Secret is gone, or lacks something.
            KubeError: the API server failed.
        """
        secret = await self._kube.get(ObjectRef("Secret", namespace, child_names.SHARED_GATEWAY))
        config = await self._kube.get(ObjectRef("ConfigMap", namespace, child_names.SHARED_GATEWAY))
        try:
            there = secret or {"metadata": {"name": child_names.SHARED_GATEWAY}, "data": {}}
            public, token = public_keys(there, labels.GATEWAY), read(there, labels.ADMIN_TOKEN)
        except ValueError as error:
            raise Refused("KeysUnusable", str(error)) from error
        served = _served_models(config or {})
        wanted = {one.name: (list(sharing.model_names[one.name]), one.suspend) for one in sharing.services}
        failure = BlockingReason(
            "NeighbourInvalid",
            f"InferenceService {', '.join(invalid_names)}, which has the same gateway, cannot be read; until "
            "it can, the gateway stays as it is: see its condition Failed, or delete it",
        )
        left_out = frozenset(name for name, entry in wanted.items() if served.get(name) != entry)
        return SharedGateway(sharing, deployment, public, token, False, failure, left_out)


def live_owner_names(live: Mapping[str, Any] | None, services: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of those among services who own an object with others, and are not about to go."""
    references = live["metadata"].get("ownerReferences", []) if live is not None else []
    uids = {reference["uid"] for reference in references}
    metas = [body["metadata"] for body in services]
    return [meta["name"] for meta in metas if meta["uid"] in uids and "deletionTimestamp" not in meta]


def _served_models(config: Mapping[str, Any]) -> dict[str, tuple[list[str], bool]]:
    """Names of the model, and whether it is suspended, of each service that a gateway is told to serve."""
    content = config.get("data", {}).get(labels.SERVICES_FILE)
    entries: list[dict[str, Any]] = json.loads(content)["services"] if content else []
    return {one["name"]: (one["models"], one["suspended"]) for one in entries}
