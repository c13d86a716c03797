# SPDX-License-Identifier: Apache-2.0
"""Builds the Secrets of a service: CURVE keys of engines and gateways, and the token of the admin API.

A root Secret, which no pod mounts, contains the random values. The two Secrets that engine and gateway pods
mount are derived from it, and it can be restored from them. So neither a crash between writes nor the
deletion of one of the three leaves Secrets that do not match.

A rotation consists of two writes to the root Secret: `begin_rotation` adds the next generation, whose keys
have the prefix `next.`. Once all pods use it, `finish_rotation` makes it the only generation.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import zmq

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.types import InferenceService
from mizzen_operator.resources.metadata import metadata
from mizzen_operator.resources.secret_data import (
    annotation,
    encode_value,
    read_key_pair,
    read_value,
    secret_values,
    unusable_error,
)

NEXT, GENERATION = "next.", "generation"
ENGINE_SECRET, GATEWAY_SECRET = "engine.secret", "gateway.secret"


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """Public keys of a service's engines.

    Attributes:
        public: the current key; during a rotation also the next one.
        generation: number of the current generation.
    """

    public: tuple[str, ...]
    generation: int = 0


def generate_keys(*, shared: bool) -> dict[str, str]:
    """Generate the random values of one generation; return them by their keys in the Secret's data.

    Args:
        shared: generate only the engine's key, because the shared gateway has its own Secret.
    """
    data = {ENGINE_SECRET: zmq.curve_keypair()[1].decode()}
    if not shared:
        data[GATEWAY_SECRET] = zmq.curve_keypair()[1].decode()
        data[labels.ADMIN_TOKEN] = secrets.token_urlsafe(32)
    return data


def root_secret(service: InferenceService) -> dict[str, Any]:
    """Return a root Secret with new random values."""
    annotations = {labels.ROTATE_KEYS: service.rotate_keys} if service.rotate_keys else {}
    return _secret(
        service,
        child_names.root_keys_secret(service.name),
        "keys",
        generate_keys(shared=service.shares_gateway),
        annotations,
    )


def begin_rotation(
    root: Mapping[str, Any], new_values: Mapping[str, str], request: str, now: str
) -> dict[str, Any]:
    """Return the patch of a root Secret that adds the next generation.

    Args:
        root: the root Secret as stored.
        new_values: values from `generate_keys`.
        request: value of the rotate-keys annotation that this rotation handles.
        now: the time, as Kubernetes writes it.
    """
    annotations = {labels.ROTATE_KEYS: request or None, labels.NEXT_KEYS_MADE: now}
    return _patch(root, annotations, {NEXT + key: encode_value(value) for key, value in new_values.items()})


def finish_rotation(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the patch of a root Secret that makes the next generation the only one."""
    following = {key: value for key, value in secret_values(root).items() if key.startswith(NEXT)}
    data = {key.removeprefix(NEXT): value for key, value in following.items()}
    gone = dict.fromkeys(following)
    annotations = {
        labels.KEYS_MADE: annotation(root, labels.NEXT_KEYS_MADE) or None,
        labels.NEXT_KEYS_MADE: None,
    }
    return _patch(
        root, annotations, {**data, **gone, GENERATION: encode_value(str(read_generation(root) + 1))}
    )


def apply_patch(secret: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Secret as it is after a patch of this module, apart from its resourceVersion."""
    meta = {**secret["metadata"], **patch["metadata"]}
    annotations = {**secret["metadata"].get("annotations", {}), **patch["metadata"].get("annotations", {})}
    meta["annotations"] = {key: value for key, value in annotations.items() if value is not None}
    data = {**secret_values(secret), **patch.get("data", {})}
    data = {key: value for key, value in data.items() if value is not None}
    return {**secret, "metadata": meta, "data": data}


def is_rotating(root: Mapping[str, Any]) -> bool:
    """Return whether a Secret contains a next generation."""
    return not secret_values(root).keys().isdisjoint({NEXT + ENGINE_SECRET, NEXT + GATEWAY_SECRET})


def read_generation(secret: Mapping[str, Any]) -> int:
    """Return the number of a Secret's current generation; 0 before the first rotation.

    Raises:
        ValueError: the number is invalid; the message names the Secret.
    """
    if GENERATION not in secret_values(secret):
        return 0
    text = read_value(secret, GENERATION)
    if not labels.is_valid_number(text):
        raise unusable_error(secret, GENERATION)
    return int(text)


def keys_created(secret: Mapping[str, Any]) -> str:
    """Return the creation time of a Secret's current generation, with time zone; empty if it is unknown."""
    for time in (annotation(secret, labels.KEYS_MADE), secret["metadata"].get("creationTimestamp", "")):
        with suppress(ValueError):
            if datetime.fromisoformat(time).tzinfo is not None:
                return time
    return ""


def mounted_secrets(service: InferenceService, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the Secrets that engine pods and pods of a dedicated gateway mount.

    Args:
        service: owner of the Secrets.
        root: the root Secret as stored.
    """
    engine, gateway = _generation_entry(root), _generation_entry(root)
    for prefix in _prefixes(root):
        for own, side in ((engine, labels.ENGINE), (gateway, labels.GATEWAY)):
            name = f"{prefix}{side}"
            own[f"{name}.secret"], public = read_key_pair(root, f"{name}.secret")
            engine[f"{name}.public"] = gateway[f"{name}.public"] = public
        gateway[prefix + labels.ADMIN_TOKEN] = read_value(root, prefix + labels.ADMIN_TOKEN)
    return [
        _secret(
            service,
            child_names.engine_keys_secret(service.name),
            labels.ENGINE,
            engine,
            _key_annotations(root),
        ),
        _secret(
            service,
            child_names.gateway_keys_secret(service.name),
            labels.GATEWAY,
            gateway,
            _key_annotations(root),
        ),
    ]


def mounted_engine_secret(
    service: InferenceService, root: Mapping[str, Any], gateways: tuple[str, ...]
) -> dict[str, Any]:
    """Return the Secret of the engine pods of a service that shares a gateway.

    Args:
        service: owner of the Secret.
        root: the root Secret as stored.
        gateways: public keys of the shared gateway: the current one, and during a rotation the next one.
            Engines accept only connections with these keys.
    """
    data = _generation_entry(root)
    for prefix in _prefixes(root):
        name = f"{prefix}engine"
        data[f"{name}.secret"], data[f"{name}.public"] = read_key_pair(root, f"{name}.secret")
    for prefix, key in zip(("", NEXT), gateways, strict=False):
        data[f"{prefix}gateway.public"] = key
    return _secret(
        service, child_names.engine_keys_secret(service.name), labels.ENGINE, data, _key_annotations(root)
    )


def public_keys(secret: Mapping[str, Any], side: str) -> tuple[str, ...]:
    """Return the public keys that belong to the secret keys in a Secret: the current one, then the next.

    Args:
        secret: the Secret.
        side: `engine` or `gateway`.

    Raises:
        ValueError: a key is missing or invalid; the message names it and the Secret.
    """
    prefixes = [
        prefix for prefix in ("", NEXT) if not prefix or f"{prefix}{side}.secret" in secret_values(secret)
    ]
    return tuple(read_key_pair(secret, f"{prefix}{side}.secret")[1] for prefix in prefixes)


def engine_keys(secret: Mapping[str, Any]) -> EngineKeys:
    """Return the public keys and the generation of a service's engines, from a Secret with their secret keys.

    Raises:
        ValueError: a key is missing or invalid; the message names it and the Secret.
    """
    return EngineKeys(public_keys(secret, labels.ENGINE), read_generation(secret))


def connection_key_name(engine_public: str, gateway_public: str) -> str:
    """Return the name by which gateways report the pair of keys that a connection uses."""
    return hashlib.sha256(f"{engine_public} {gateway_public}".encode()).hexdigest()[:16]


def restored_shared_root_secret(service: InferenceService, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the root Secret of a service with a shared gateway from the Secret that engine pods mount.

    Raises:
        ValueError: a key is missing; the message names it and the Secret.
    """
    data = {
        **_generation_entry(engine),
        **{
            f"{prefix}engine.secret": read_value(engine, f"{prefix}engine.secret")
            for prefix in _prefixes(engine)
        },
    }
    return _secret(
        service, child_names.root_keys_secret(service.name), "keys", data, _key_annotations(engine)
    )


def restored_root_secret(
    service: InferenceService, engine: Mapping[str, Any], gateway: Mapping[str, Any]
) -> dict[str, Any]:
    """Restore the root Secret from the two mounted Secrets, with the generations that both contain.

    Raises:
        ValueError: a key is missing; the message names it and the Secret.
    """
    sides = [
        {read_generation(secret) + index: prefix for index, prefix in enumerate(_prefixes(secret))}
        for secret in (engine, gateway)
    ]
    both = sorted(sides[0].keys() & sides[1].keys()) or [read_generation(engine)]
    data = {GENERATION: str(both[0])} if both[0] else {}
    for prefix, number in zip(("", NEXT), both, strict=False):
        theirs = sides[1].get(number, "")
        data[f"{prefix}engine.secret"] = read_value(engine, f"{sides[0][number]}engine.secret")
        data[f"{prefix}gateway.secret"] = read_value(gateway, f"{theirs}gateway.secret")
        data[prefix + labels.ADMIN_TOKEN] = read_value(gateway, theirs + labels.ADMIN_TOKEN)
    annotations = _key_annotations(engine)
    if sides[0].keys() != sides[1].keys():
        # The root Secret was lost between two writes of a rotation, so the request must be handled again.
        annotations = {key: value for key, value in annotations.items() if key == labels.KEYS_MADE}
    return _secret(service, child_names.root_keys_secret(service.name), "keys", data, annotations)


def mounted_secret_patch(
    live: Mapping[str, Any], wanted: Mapping[str, Any], root: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the patch that makes a mounted Secret match the root Secret; None if it matches already.

    Args:
        live: the mounted Secret as stored.
        wanted: the mounted Secret as derived from the root Secret.
        root: the root Secret.

    Raises:
        ValueError: `live` contains none of the root Secret's secret keys, so the pods would not know the new
            keys; the message says what to delete.
    """
    if live.get("data") == wanted["data"]:
        return None
    ours = {key: value for key, value in wanted["data"].items() if key.endswith(".secret")}
    theirs = {value for key, value in secret_values(live).items() if key.endswith(".secret")}
    if not theirs & set(ours.values()):
        name, other = live["metadata"]["name"], root["metadata"]["name"]
        raise ValueError(
            f"Secret {name} does not match Secret {other}: delete Secret {name}; once it has been recreated, "
            "delete all pods of the service, so that they start with the new keys"
        )
    return _patch(
        live,
        wanted["metadata"].get("annotations", {}),
        {**dict.fromkeys(secret_values(live)), **wanted["data"]},
    )


def _prefixes(secret: Mapping[str, Any]) -> tuple[str, ...]:
    return ("", NEXT) if is_rotating(secret) else ("",)


def _generation_entry(secret: Mapping[str, Any]) -> dict[str, str]:
    number = read_generation(secret)
    return {GENERATION: str(number)} if number else {}


def _key_annotations(secret: Mapping[str, Any]) -> dict[str, str]:
    """Return those annotations of a Secret that describe its keys."""
    names = (labels.ROTATE_KEYS, labels.KEYS_MADE, labels.NEXT_KEYS_MADE)
    annotations = {name: annotation(secret, name) for name in names}
    return {name: value for name, value in annotations.items() if value}


def _patch(
    secret: Mapping[str, Any], annotations: Mapping[str, str | None], data: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return a merge patch that applies only to this resourceVersion of a Secret."""
    version = secret["metadata"].get("resourceVersion")
    meta = {"annotations": dict(annotations), **({"resourceVersion": version} if version else {})}
    return {"metadata": meta, "data": dict(data)}


def _secret(
    service: InferenceService,
    name: str,
    component: str,
    data: Mapping[str, str],
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(service, name, component, annotations=annotations),
        "type": "Opaque",
        "data": {key: encode_value(value) for key, value in data.items()},
    }
