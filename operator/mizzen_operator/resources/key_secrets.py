"""Builds the Secrets of a service: CURVE keys of both sides, and the token of the gateways' admin API.

A root Secret, which no pod mounts, holds the random values. The Secrets of engine and gateway pods are
derived from it, and it can be restored from both. So a crash between writes, or the deletion of any one of
the three, never leaves parts that do not match.

A rotation is two writes to the root Secret: `begin_rotation` adds a next generation, with keys prefixed by
`next.`, and `finish_rotation` makes it the only one, once all pods use it.
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
        public: the present key, and perhaps the next.
        generation: number of the present generation.
    """

    public: tuple[str, ...]
    generation: int = 0


def generate_keys(*, shared: bool) -> dict[str, str]:
    """Generate the random values of one generation; only the engine's key if the gateway is shared."""
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
    root: Mapping[str, Any], given: Mapping[str, str], request: str, now: str
) -> dict[str, Any]:
    """Return the patch that adds a next generation.

    Args:
        root: the Secret as the API server holds it.
        given: values from `generate_keys`.
        request: value of the rotate-keys annotation that is handled by this rotation.
        now: the time, as Kubernetes writes it.
    """
    annotations = {labels.ROTATE_KEYS: request or None, labels.NEXT_KEYS_MADE: now}
    return _patch(root, annotations, {NEXT + key: encode_value(value) for key, value in given.items()})


def finish_rotation(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the patch that makes the next generation the only one."""
    following = {key: value for key, value in secret_values(root).items() if key.startswith(NEXT)}
    data = {key.removeprefix(NEXT): value for key, value in following.items()}
    gone = dict.fromkeys(following)
    annotations = {
        labels.KEYS_MADE: annotation(root, labels.NEXT_KEYS_MADE) or None,
        labels.NEXT_KEYS_MADE: None,
    }
    return _patch(root, annotations, {**data, **gone, GENERATION: encode_value(str(generation(root) + 1))})


def apply_patch(secret: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Secret after one of these patches, apart from its resourceVersion."""
    meta = {**secret["metadata"], **patch["metadata"]}
    annotations = {**secret["metadata"].get("annotations", {}), **patch["metadata"].get("annotations", {})}
    meta["annotations"] = {key: value for key, value in annotations.items() if value is not None}
    data = {**secret_values(secret), **patch.get("data", {})}
    data = {key: value for key, value in data.items() if value is not None}
    return {**secret, "metadata": meta, "data": data}


def is_rotating(root: Mapping[str, Any]) -> bool:
    """Return whether there is a next generation."""
    return not secret_values(root).keys().isdisjoint({NEXT + ENGINE_SECRET, NEXT + GATEWAY_SECRET})


def generation(secret: Mapping[str, Any]) -> int:
    """Return the number of the present generation.

    Raises:
        ValueError: names the Secret whose number is invalid.
    """
    if GENERATION not in secret_values(secret):
        return 0
    text = read_value(secret, GENERATION)
    if not labels.is_valid_number(text):
        raise unusable_error(secret, GENERATION)
    return int(text)


def keys_created(secret: Mapping[str, Any]) -> str:
    """Return the creation time of the present generation, with its time zone; empty for now."""
    for time in (annotation(secret, labels.KEYS_MADE), secret["metadata"].get("creationTimestamp", "")):
        with suppress(ValueError):
            if datetime.fromisoformat(time).tzinfo is not None:
                return time
    return ""


def mounted_secrets(service: InferenceService, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the Secrets that engine and gateway pods mount.

    Args:
        service: owner of the Secrets.
        root: root Secret as the API server holds it.
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
        root: root Secret as the API server holds it.
        gateways: public keys of the shared gateway, the present one and perhaps the next; engines accept no
            other gateway.
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
    """Return the public keys of a side whose secret keys a Secret has: the present one, and perhaps the next.

    Raises:
        ValueError: names the Secret and the missing key.
    """
    prefixes = [
        prefix for prefix in ("", NEXT) if not prefix or f"{prefix}{side}.secret" in secret_values(secret)
    ]
    return tuple(read_key_pair(secret, f"{prefix}{side}.secret")[1] for prefix in prefixes)


def engine_keys(secret: Mapping[str, Any]) -> EngineKeys:
    """Return the public keys of the engines whose secret keys a Secret has.

    Raises:
        ValueError: names the Secret and the missing key.
    """
    return EngineKeys(public_keys(secret, labels.ENGINE), generation(secret))


def connection_key_name(engine_public: str, gateway_public: str) -> str:
    """Return the name by which gateways report the keys of a connection."""
    return hashlib.sha256(f"{engine_public} {gateway_public}".encode()).hexdigest()[:16]


def restored_shared_root_secret(service: InferenceService, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the root Secret of a service with a shared gateway, restored from the mounted one.

    Raises:
        ValueError: names the Secret and the missing key.
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
    """Return the root Secret, restored from the generations that both mounted Secrets have.

    Raises:
        ValueError: names the Secret and the missing key.
    """
    sides = [
        {generation(secret) + index: prefix for index, prefix in enumerate(_prefixes(secret))}
        for secret in (engine, gateway)
    ]
    both = sorted(sides[0].keys() & sides[1].keys()) or [generation(engine)]
    data = {GENERATION: str(both[0])} if both[0] else {}
    for prefix, number in zip(("", NEXT), both, strict=False):
        theirs = sides[1].get(number, "")
        data[f"{prefix}engine.secret"] = read_value(engine, f"{sides[0][number]}engine.secret")
        data[f"{prefix}gateway.secret"] = read_value(gateway, f"{theirs}gateway.secret")
        data[prefix + labels.ADMIN_TOKEN] = read_value(gateway, theirs + labels.ADMIN_TOKEN)
    annotations = _key_annotations(engine)
    if (
        sides[0].keys() != sides[1].keys()
    ):  # it was lost between two writes: an unhandled request must be handled again
        annotations = {key: value for key, value in annotations.items() if key == labels.KEYS_MADE}
    return _secret(service, child_names.root_keys_secret(service.name), "keys", data, annotations)


def mounted_secret_patch(
    live: Mapping[str, Any], wanted: Mapping[str, Any], root: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the patch that makes a mounted Secret match the root; None if it does.

    Raises:
        ValueError: the two have no key in common, so pods have other keys than the root; says what to delete.
    """
    if live.get("data") == wanted["data"]:
        return None
    ours = {key: value for key, value in wanted["data"].items() if key.endswith(".secret")}
    theirs = {value for key, value in secret_values(live).items() if key.endswith(".secret")}
    if not theirs & set(ours.values()):
        name, other = live["metadata"]["name"], root["metadata"]["name"]
        raise ValueError(
            f"Secret {name} does not match Secret {other}: delete Secret {name}, and once it is back all "
            "pods of the service, which start with the new keys"
        )
    return _patch(
        live,
        wanted["metadata"].get("annotations", {}),
        {**dict.fromkeys(secret_values(live)), **wanted["data"]},
    )


def _prefixes(secret: Mapping[str, Any]) -> tuple[str, ...]:
    return ("", NEXT) if is_rotating(secret) else ("",)


def _generation_entry(secret: Mapping[str, Any]) -> dict[str, str]:
    number = generation(secret)
    return {GENERATION: str(number)} if number else {}


def _key_annotations(secret: Mapping[str, Any]) -> dict[str, str]:
    """Return the annotations of a Secret about its keys."""
    names = (labels.ROTATE_KEYS, labels.KEYS_MADE, labels.NEXT_KEYS_MADE)
    found = {name: annotation(secret, name) for name in names}
    return {name: value for name, value in found.items() if value}


def _patch(
    secret: Mapping[str, Any], annotations: Mapping[str, str | None], data: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return a merge patch of this resourceVersion of a Secret."""
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
