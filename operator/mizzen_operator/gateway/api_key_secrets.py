# SPDX-License-Identifier: Apache-2.0
"""Finds Secrets with API keys by label; only their metadata is read. Gateways of both kinds use it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mizzen_operator.api import labels, reasons
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError, Refused
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.resources.gateway_spec import GatewaySpec

logger = logging.getLogger(__name__)

MAX_SECRETS = 64
"""Maximum number of labelled Secrets that a gateway mounts; if there are more, it mounts the oldest."""


class GatewayKey(NamedTuple):
    """Namespace and name of a gateway."""

    namespace: str
    gateway: str


class ApiKeySecrets:
    """Finds the Secrets whose label `mizzen.dev/api-keys` names a gateway.

    Each reconcile of a gateway that uses such Secrets lists them. Between reconciles, `changed_gateways`
    lists the Secrets of all gateways to find changes. So the permission to list suffices, and no watch has to
    be kept alive.
    """

    def __init__(self, kube: KubeClient, namespace: str) -> None:
        """Create an object that finds Secrets in `namespace`, or in all namespaces if it is empty."""
        self._kube = kube
        self._namespace = namespace
        self._selected: dict[GatewayKey, tuple[str, ...]] = {}

    async def find(self, spec: GatewaySpec) -> tuple[str, ...]:
        """Return the names of the labelled Secrets that a gateway should mount.

        The result is empty if the gateway does not find API keys by label.

        Raises:
            Refused: the operator may not list Secrets.
            KubeError: the API server failed.
        """
        gateway_key = GatewayKey(spec.namespace, spec.name)
        if not spec.gateway.keys_from_label:
            self.forget(gateway_key)
            return ()
        try:
            listed = await self._kube.list_metadata(
                ObjectRef("Secret", spec.namespace), f"{labels.API_KEYS}={spec.name}"
            )
        except KubeError as error:
            if error.code != 403:
                raise
            raise Refused(
                reasons.SECRETS_FORBIDDEN,
                "spec.gateway.apiKeys.fromLabel needs an operator that may list Secrets (the chart's "
                f"rbac.listSecrets): {error}",
            ) from error
        names = select_secrets(listed)
        if self._selected.get(gateway_key) != names and len(names) < len(listed):
            logger.warning(
                "%s/%s: more than %d Secrets with API keys: only the oldest are mounted",
                *gateway_key,
                MAX_SECRETS,
            )
        self._selected[gateway_key] = names
        return names

    def forget(self, gateway_key: GatewayKey) -> None:
        """Stop tracking a gateway's Secrets."""
        self._selected.pop(gateway_key, None)

    async def changed_gateways(self) -> list[GatewayKey]:
        """Return the gateways that should mount a different set of Secrets than at their last reconcile.

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
        return [
            gateway_key
            for gateway_key, names in self._selected.items()
            if select_secrets(by_gateway[gateway_key]) != names
        ]


def select_secrets(secrets: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the sorted names of the oldest MAX_SECRETS Secrets; ignore Secrets that are being deleted."""
    metas = [body["metadata"] for body in secrets if "deletionTimestamp" not in body["metadata"]]
    metas.sort(key=lambda meta: (meta["creationTimestamp"], meta["name"]))
    return tuple(sorted(meta["name"] for meta in metas[:MAX_SECRETS]))
