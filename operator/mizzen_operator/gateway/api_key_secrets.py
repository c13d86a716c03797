"""Secrets with API keys, found by their label; of what is in them the operator asks for nothing."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mizzen_operator.api import labels
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError, Refused
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.resources.gateway_spec import Front

logger = logging.getLogger(__name__)

MAX_SECRETS = 64
"""Secrets that a gateway finds by their label; the newest beyond are left out."""


class GatewayKey(NamedTuple):
    """A gateway: its namespace and name."""

    namespace: str
    gateway: str


class ApiKeySecrets:
    """Finds the Secrets that carry the name of a gateway in the label `mizzen.dev/api-keys`.

    They are listed at each look at a gateway that asks for them, and `news` compares all at once in between:
    so the right to list is all that is needed, and no watch has to be kept alive.
    """

    def __init__(self, kube: KubeClient, namespace: str) -> None:
        """Find Secrets of `namespace`, or of all namespaces when it is empty."""
        self._kube = kube
        self._namespace = namespace
        self._selected: dict[GatewayKey, tuple[str, ...]] = {}

    async def find(self, front: Front) -> tuple[str, ...]:
        """Names of the Secrets that a gateway is to mount, beside those that its spec names.

        Raises:
            Refused: the operator may not list Secrets.
            KubeError: the API server failed.
        """
        gateway_key = GatewayKey(front.namespace, front.name)
        if not front.gateway.keys_from_label:
            self.forget(gateway_key)
            return ()
        try:
            listed = await self._kube.list_metadata(
                ObjectRef("Secret", front.namespace), f"{labels.API_KEYS}={front.name}"
            )
        except KubeError as error:
            if error.code != 403:
                raise
            raise Refused(
                "SecretsForbidden",
                "spec.gateway.apiKeys.fromLabel needs an operator that may list Secrets (the chart's "
                f"rbac.listSecrets): {error}",
            ) from error
        names = select_secrets(listed)
        if self._selected.get(gateway_key) != names and len(names) < len(listed):
            logger.warning(
                "%s/%s: more than %d Secrets of API keys: only the oldest are mounted", *gateway_key, MAX_SECRETS
            )
        self._selected[gateway_key] = names
        return names

    def forget(self, gateway_key: GatewayKey) -> None:
        """Look for a gateway's Secrets no more."""
        self._selected.pop(gateway_key, None)

    async def changed_gateways(self) -> list[GatewayKey]:
        """Gateways whose Secrets are others than when they were looked at.

        Raises:
            KubeError: the API server failed.
        """
        if not self._selected:
            return []
        listed = await self._kube.list_metadata(
            ObjectRef("Secret", self._namespace), labels.API_KEYS, from_cache=True
        )
        by_gateway: defaultdict[GatewayKey, list[Mapping[str, Any]]] = defaultdict(list)
        for body in listed:
            meta = body["metadata"]
            by_gateway[GatewayKey(meta["namespace"], meta["labels"][labels.API_KEYS])].append(body)
        return [gateway_key for gateway_key, names in self._selected.items() if select_secrets(by_gateway[gateway_key]) != names]


def select_secrets(secrets: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of the oldest `MAX_SECRETS` of Secrets, in their own order; without those that are being deleted."""
    metas = [body["metadata"] for body in secrets if "deletionTimestamp" not in body["metadata"]]
    metas.sort(key=lambda meta: (meta["creationTimestamp"], meta["name"]))
    return tuple(sorted(meta["name"] for meta in metas[:MAX_SECRETS]))
