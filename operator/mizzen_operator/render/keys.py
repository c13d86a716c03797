"""The Secrets of a service: CURVE keys of both sides, and the token of the gateways' admin API.

One Secret, mounted nowhere, holds what is random; it is made once. What the two kinds of pods mount follows
from it, and it can be made anew of both, so a crash between creations or a deletion of any one of the three
never leaves halves that do not match.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from typing import Any

import zmq

from mizzen_operator import labels
from mizzen_operator.api import InferenceService
from mizzen_operator.render.meta import metadata


def root_keys(service: InferenceService) -> dict[str, Any]:
    """A fresh Secret with all that is random; of a service that shares a gateway, the engine's key alone."""
    data = {"engine.secret": zmq.curve_keypair()[1].decode()}
    if not service.shared:
        data["gateway.secret"] = zmq.curve_keypair()[1].decode()
        data[labels.ADMIN_TOKEN] = secrets.token_urlsafe(32)
    return _secret(service, labels.root_keys(service.name), "keys", data)


def mounted_keys(service: InferenceService, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The Secrets of the engine's and the gateway's pods.

    Args:
        service: their owner.
        root: the Secret of `root_keys` as the API server holds it.
    """
    secret = {side: read(root, f"{side}.secret") for side in (labels.ENGINE, labels.GATEWAY)}
    public = {side: zmq.curve_public(key.encode()).decode() for side, key in secret.items()}
    engine = {
        "engine.public": public["engine"],
        "engine.secret": secret["engine"],
        "gateway.public": public["gateway"],
    }
    gateway = {
        "gateway.public": public["gateway"],
        "gateway.secret": secret["gateway"],
        "engine.public": public["engine"],
        labels.ADMIN_TOKEN: read(root, labels.ADMIN_TOKEN),
    }
    return [
        _secret(service, labels.engine_keys(service.name), labels.ENGINE, engine),
        _secret(service, labels.gateway_keys(service.name), labels.GATEWAY, gateway),
    ]


def mounted_engine_keys(service: InferenceService, root: Mapping[str, Any], gateway: str) -> dict[str, Any]:
    """The Secret of the engine's pods of a service that shares a gateway.

    Args:
        service: its owner.
        root: the Secret of `root_keys` as the API server holds it.
        gateway: the public key of the shared gateway, the only one that the engines talk to.
    """
    secret = read(root, "engine.secret")
    data = {"engine.public": public_key(secret), "engine.secret": secret, "gateway.public": gateway}
    return _secret(service, labels.engine_keys(service.name), labels.ENGINE, data)


def public_key(secret: str) -> str:
    """The public half of a CURVE key."""
    return zmq.curve_public(secret.encode()).decode()


def restored_engine_key(service: InferenceService, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The Secret of `root_keys` of a service that shares a gateway, made anew of the mounted one.

    Raises:
        ValueError: names the Secret and the key that it lacks.
    """
    data = {"engine.secret": read(engine, "engine.secret")}
    return _secret(service, labels.root_keys(service.name), "keys", data)


def restored_keys(
    service: InferenceService, engine: Mapping[str, Any], gateway: Mapping[str, Any]
) -> dict[str, Any]:
    """The Secret of `root_keys`, made anew of both mounted ones.

    Raises:
        ValueError: names the Secret and the key that it lacks.
    """
    data = {
        "engine.secret": read(engine, "engine.secret"),
        "gateway.secret": read(gateway, "gateway.secret"),
        labels.ADMIN_TOKEN: read(gateway, labels.ADMIN_TOKEN),
    }
    return _secret(service, labels.root_keys(service.name), "keys", data)


def require_equal(live: Mapping[str, Any], wanted: Mapping[str, Any], root: Mapping[str, Any]) -> None:
    """Check that a mounted Secret holds what follows from the root.

    Raises:
        ValueError: it does not; says what to delete.
    """
    if live.get("data") != wanted["data"]:
        name, other = live["metadata"]["name"], root["metadata"]["name"]
        raise ValueError(
            f"Secret {name} does not match Secret {other}: delete Secret {name}, and once it is back all "
            "pods of the service, which start with the new keys"
        )


def read(secret: Mapping[str, Any], key: str) -> str:
    """One value of a Secret as text.

    Raises:
        ValueError: names the Secret and the key that it lacks.
    """
    try:
        return base64.b64decode(secret["data"][key]).decode()
    except (KeyError, TypeError, ValueError) as error:
        name = secret["metadata"]["name"]
        raise ValueError(f"Secret {name} has no usable {key}: delete it to have it made anew") from error


def _secret(service: InferenceService, name: str, component: str, data: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(service, name, component),
        "type": "Opaque",
        "immutable": True,
        "data": {key: base64.b64encode(value.encode()).decode() for key, value in data.items()},
    }
