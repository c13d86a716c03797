# SPDX-License-Identifier: Apache-2.0
"""Builds the description of a shared gateway, and the objects that only a shared gateway has.

All services that share the gateway own its objects, so the garbage collector deletes them with the last
service.
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
from mizzen_operator.resources.gateway_spec import GatewaySpec
from mizzen_operator.resources.key_secrets import EngineKeys
from mizzen_operator.resources.metadata import with_applied_hash
from mizzen_operator.resources.secret_data import encode_value

SELECTOR = {labels.GATEWAY_LABEL: labels.SHARED, labels.COMPONENT: labels.GATEWAY}


def shared_gateway_spec(sharing: GatewaySharing) -> GatewaySpec:
    """Return the description of the gateway that a namespace's services share."""
    pulls = {
        secret["name"]: secret
        for service in sharing.services
        for secret in service.pod_template["imagePullSecrets"]
    }
    return GatewaySpec(
        name=child_names.SHARED_GATEWAY,
        namespace=sharing.oldest.namespace,
        selector=SELECTOR,
        owners=tuple(co_owner_reference(service) for service in sharing.services),
        keys_secret=child_names.SHARED_GATEWAY,
        arguments=(("--services-config-map", child_names.SHARED_GATEWAY),),
        gateway=sharing.oldest.gateway,
        drain_timeout=sharing.drain_timeout,
        image_pull_secrets=tuple(pulls.values()),
        tracing=sharing.oldest.tracing,
        disruption_budgets=sharing.oldest.availability.disruption_budgets,
        common=sharing.oldest.common,
    )


def co_owner_reference(service: InferenceService) -> dict[str, Any]:
    """Return an owner reference to a service; it omits `controller`, which only one owner may set."""
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "name": service.name,
        "uid": service.uid,
    }


def services_config_map(
    sharing: GatewaySharing, spec: GatewaySpec, public_keys: Mapping[str, EngineKeys]
) -> dict[str, Any]:
    """Return the ConfigMap that tells a shared gateway which services it serves.

    Args:
        sharing: services that share the gateway.
        spec: description of the gateway.
        public_keys: public keys of the services' engines, by service name; new services may be missing.
    """
    entries = [_entry(service, sharing, public_keys) for service in sharing.services]
    content = json.dumps({"services": entries}, indent=1) + "\n"
    manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": spec.metadata(),
        "data": {labels.SERVICES_FILE: content},
    }
    return with_applied_hash(manifest)


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


def generate_gateway_keys() -> dict[str, str]:
    """Generate the CURVE keys and the admin token of a shared gateway."""
    public, secret = zmq.curve_keypair()
    return {
        "gateway.public": public.decode(),
        "gateway.secret": secret.decode(),
        labels.ADMIN_TOKEN: secrets.token_urlsafe(32),
    }


def shared_keys_secret(spec: GatewaySpec, handled_request: str = "") -> dict[str, Any]:
    """Return the Secret of a shared gateway, with new CURVE keys and a new admin token.

    Args:
        spec: description of the gateway.
        handled_request: value of the rotate-keys annotation. The new keys satisfy this request, so the Secret
            records it as handled. Empty if the annotation is not set.
    """
    meta = spec.metadata()
    if handled_request:
        meta = {**meta, "annotations": {**meta.get("annotations", {}), labels.ROTATE_KEYS: handled_request}}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": meta,
        "type": "Opaque",
        "data": {key: encode_value(value) for key, value in generate_gateway_keys().items()},
    }


def owners_patch(secret: Mapping[str, Any], spec: GatewaySpec) -> dict[str, Any] | None:
    """Return the patch that makes the owners of the gateway own a Secret; None if they own it already."""
    wanted = sorted(spec.metadata()["ownerReferences"], key=lambda owner: owner["uid"])
    live = sorted(secret["metadata"].get("ownerReferences", []), key=lambda owner: owner["uid"])
    if live == wanted:
        return None
    version = secret["metadata"]["resourceVersion"]
    return {"metadata": {"ownerReferences": wanted, "resourceVersion": version}}
