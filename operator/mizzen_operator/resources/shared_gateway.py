"""The gateway that a namespace's services share: what is its own beside what every gateway has.

Its objects are owned by all of these services, so that the garbage collector removes them with the last one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

import zmq

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.gateway_sharing import GatewaySharing
from mizzen_operator.api.types import InferenceService
from mizzen_operator.resources.gateway_spec import Front
from mizzen_operator.resources.key_secrets import EngineKeys
from mizzen_operator.resources.metadata import stamped
from mizzen_operator.resources.secret_data import encode

SELECTOR = {labels.GATEWAY_LABEL: labels.SHARED, labels.COMPONENT: labels.GATEWAY}


def shared(sharing: GatewaySharing) -> Front:
    """The gateway of several services."""
    pulls = {
        secret["name"]: secret
        for service in sharing.services
        for secret in service.pod_template["imagePullSecrets"]
    }
    return Front(
        name=child_names.SHARED_GATEWAY,
        namespace=sharing.oldest.namespace,
        selector=SELECTOR,
        owners=tuple(co_owner(service) for service in sharing.services),
        keys=child_names.SHARED_GATEWAY,
        arguments=(("--services-config-map", child_names.SHARED_GATEWAY),),
        gateway=sharing.oldest.gateway,
        drain_timeout=sharing.drain_timeout,
        image_pull_secrets=tuple(pulls.values()),
        tracing=sharing.oldest.tracing,
        disruption_budgets=sharing.oldest.availability.disruption_budgets,
    )


def co_owner(service: InferenceService) -> dict[str, Any]:
    """The owner reference of one owner among several."""
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "name": service.name,
        "uid": service.uid,
    }


def services_config_map(
    sharing: GatewaySharing, front: Front, public_keys: Mapping[str, EngineKeys]
) -> dict[str, Any]:
    """The ConfigMap that tells the gateway whom it serves.

    Args:
        public_keys: CURVE keys of the services' engines, by the service's name; one may be missing yet.
    """
    entries = [_entry(service, sharing, public_keys) for service in sharing.services]
    content = json.dumps({"services": entries}, indent=1) + "\n"
    manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": front.metadata(),
        "data": {labels.SERVICES_FILE: content},
    }
    return stamped(manifest)


def _entry(
    service: InferenceService, sharing: GatewaySharing, public_keys: Mapping[str, EngineKeys]
) -> dict[str, Any]:
    keys = public_keys.get(service.name, EngineKeys(()))
    names = ("enginePublicKey", "nextEnginePublicKey")
    return {
        "name": service.name,
        "models": list(sharing.model_names[service.name]),
        "suspended": service.suspend,
        **dict(zip(names, keys.public, strict=False)),
        **({"keysGeneration": keys.generation} if keys.generation else {}),
    }


def fresh_shared_keys() -> dict[str, str]:
    """A fresh CURVE pair and admin token of a shared gateway."""
    public, secret = zmq.curve_keypair()
    return {
        "gateway.public": public.decode(),
        "gateway.secret": secret.decode(),
        labels.ADMIN_TOKEN: secrets.token_urlsafe(32),
    }


def shared_keys(front: Front, asked: str = "") -> dict[str, Any]:
    """A fresh Secret with the gateway's CURVE pair and admin token.

    Args:
        front: the gateway.
        asked: the annotation mizzen.dev/rotate-keys that need not be obeyed any more.
    """
    meta = front.metadata()
    if asked:
        meta = {**meta, "annotations": {**meta.get("annotations", {}), labels.ROTATE_KEYS: asked}}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": meta,
        "type": "Opaque",
        "data": {key: encode(value) for key, value in fresh_shared_keys().items()},
    }


def owners_patch(secret: Mapping[str, Any], front: Front) -> dict[str, Any] | None:
    """The patch that makes a Secret's owners those of the gateway; None when they are."""
    wanted = sorted(front.metadata()["ownerReferences"], key=lambda one: one["uid"])
    live = sorted(secret["metadata"].get("ownerReferences", []), key=lambda one: one["uid"])
    if live == wanted:
        return None
    version = secret["metadata"]["resourceVersion"]
    return {"metadata": {"ownerReferences": wanted, "resourceVersion": version}}
