"""The Secrets of a service: CURVE keys of both sides, and the token of the gateways' admin API.

One Secret, mounted nowhere, holds what is random. What the two kinds of pods mount follows from it, and it
can be made anew of both, so a crash between writes or a deletion of any one of the three never leaves halves
that do not match.

A rotation is two writes of that one Secret: `begin` adds a next generation, whose keys begin with `next.`,
and `finish` makes it the only one, once all who mount the others use it.
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
from mizzen_operator.resources.secret_data import annotation, data_of, encode, pair_of, read, unusable

NEXT, GENERATION = "next.", "generation"
ENGINE_SECRET, GATEWAY_SECRET = "engine.secret", "gateway.secret"


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """Public keys of a service's engines: the present one, perhaps the next; and the first one's number."""

    public: tuple[str, ...]
    generation: int = 0


def fresh(*, shared: bool) -> dict[str, str]:
    """What is random of one generation; of a service that shares a gateway, the engine's key alone."""
    data = {ENGINE_SECRET: zmq.curve_keypair()[1].decode()}
    if not shared:
        data[GATEWAY_SECRET] = zmq.curve_keypair()[1].decode()
        data[labels.ADMIN_TOKEN] = secrets.token_urlsafe(32)
    return data


def root_keys(service: InferenceService) -> dict[str, Any]:
    """A fresh Secret with all that is random."""
    asked = {labels.ROTATE_KEYS: service.rotate_keys} if service.rotate_keys else {}
    return _secret(
        service, child_names.root_keys_secret(service.name), "keys", fresh(shared=service.shared), asked
    )


def begin(root: Mapping[str, Any], given: Mapping[str, str], request: str, now: str) -> dict[str, Any]:
    """The patch that adds a next generation.

    Args:
        root: the Secret as the API server holds it.
        given: what `fresh` made.
        request: the annotation that is obeyed with it.
        now: the time, as Kubernetes writes it.
    """
    notes = {labels.ROTATE_KEYS: request or None, labels.NEXT_KEYS_MADE: now}
    return _patch(root, notes, {NEXT + key: encode(value) for key, value in given.items()})


def finish(root: Mapping[str, Any]) -> dict[str, Any]:
    """The patch that makes the next generation the only one."""
    following = {key: value for key, value in data_of(root).items() if key.startswith(NEXT)}
    data = {key.removeprefix(NEXT): value for key, value in following.items()}
    gone = dict.fromkeys(following)
    notes = {labels.KEYS_MADE: annotation(root, labels.NEXT_KEYS_MADE) or None, labels.NEXT_KEYS_MADE: None}
    return _patch(root, notes, {**data, **gone, GENERATION: encode(str(generation(root) + 1))})


def applied(secret: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """A Secret as one of these patches leaves it, but for its version."""
    meta = {**secret["metadata"], **patch["metadata"]}
    notes = {**secret["metadata"].get("annotations", {}), **patch["metadata"].get("annotations", {})}
    meta["annotations"] = {key: value for key, value in notes.items() if value is not None}
    data = {**data_of(secret), **patch.get("data", {})}
    data = {key: value for key, value in data.items() if value is not None}
    return {**secret, "metadata": meta, "data": data}


def rotating(root: Mapping[str, Any]) -> bool:
    """Whether there is a next generation."""
    return not data_of(root).keys().isdisjoint({NEXT + ENGINE_SECRET, NEXT + GATEWAY_SECRET})


def generation(secret: Mapping[str, Any]) -> int:
    """Number of the present generation.

    Raises:
        ValueError: names the Secret whose number cannot be used.
    """
    if GENERATION not in data_of(secret):
        return 0
    text = read(secret, GENERATION)
    if not labels.is_valid_number(text):
        raise unusable(secret, GENERATION)
    return int(text)


def made(secret: Mapping[str, Any]) -> str:
    """When the present generation was made, with its time zone; empty for now."""
    for time in (annotation(secret, labels.KEYS_MADE), secret["metadata"].get("creationTimestamp", "")):
        with suppress(ValueError):
            if datetime.fromisoformat(time).tzinfo is not None:
                return time
    return ""


def mounted_keys(service: InferenceService, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The Secrets of the engine's and the gateway's pods.

    Args:
        service: their owner.
        root: the Secret of `root_keys` as the API server holds it.
    """
    engine, gateway = _numbered(root), _numbered(root)
    for prefix in _prefixes(root):
        for own, side in ((engine, labels.ENGINE), (gateway, labels.GATEWAY)):
            name = f"{prefix}{side}"
            own[f"{name}.secret"], public = pair_of(root, f"{name}.secret")
            engine[f"{name}.public"] = gateway[f"{name}.public"] = public
        gateway[prefix + labels.ADMIN_TOKEN] = read(root, prefix + labels.ADMIN_TOKEN)
    return [
        _secret(service, child_names.engine_keys_secret(service.name), labels.ENGINE, engine, _notes(root)),
        _secret(
            service, child_names.gateway_keys_secret(service.name), labels.GATEWAY, gateway, _notes(root)
        ),
    ]


def mounted_engine_keys(
    service: InferenceService, root: Mapping[str, Any], gateways: tuple[str, ...]
) -> dict[str, Any]:
    """The Secret of the engine's pods of a service that shares a gateway.

    Args:
        service: its owner.
        root: the Secret of `root_keys` as the API server holds it.
        gateways: the public keys of the shared gateway, the present one and perhaps the next: the engines
            talk to no other.
    """
    data = _numbered(root)
    for prefix in _prefixes(root):
        name = f"{prefix}engine"
        data[f"{name}.secret"], data[f"{name}.public"] = pair_of(root, f"{name}.secret")
    for prefix, key in zip(("", NEXT), gateways, strict=False):
        data[f"{prefix}gateway.public"] = key
    return _secret(service, child_names.engine_keys_secret(service.name), labels.ENGINE, data, _notes(root))


def public_keys(secret: Mapping[str, Any], side: str) -> tuple[str, ...]:
    """The public keys of a side that a Secret has the secret keys of: the present one, and perhaps the next.

    Raises:
        ValueError: names the Secret and the key that it lacks.
    """
    there = [prefix for prefix in ("", NEXT) if not prefix or f"{prefix}{side}.secret" in data_of(secret)]
    return tuple(pair_of(secret, f"{prefix}{side}.secret")[1] for prefix in there)


def engine_keys(secret: Mapping[str, Any]) -> EngineKeys:
    """The public keys of the engines whose secret keys a Secret has.

    Raises:
        ValueError: names the Secret and the key that it lacks.
    """
    return EngineKeys(public_keys(secret, labels.ENGINE), generation(secret))


def name_of(engine_public: str, gateway_public: str) -> str:
    """What gateways call the keys of a connection."""
    return hashlib.sha256(f"{engine_public} {gateway_public}".encode()).hexdigest()[:16]


def restored_engine_key(service: InferenceService, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The Secret of `root_keys` of a service that shares a gateway, made anew of the mounted one.

    Raises:
        ValueError: names the Secret and the key that it lacks.
    """
    data = {
        **_numbered(engine),
        **{f"{prefix}engine.secret": read(engine, f"{prefix}engine.secret") for prefix in _prefixes(engine)},
    }
    return _secret(service, child_names.root_keys_secret(service.name), "keys", data, _notes(engine))


def restored_keys(
    service: InferenceService, engine: Mapping[str, Any], gateway: Mapping[str, Any]
) -> dict[str, Any]:
    """The Secret of `root_keys`, made anew of both mounted ones: of the generations that both have.

    Raises:
        ValueError: names the Secret and the key that it lacks.
    """
    sides = [
        {generation(secret) + index: prefix for index, prefix in enumerate(_prefixes(secret))}
        for secret in (engine, gateway)
    ]
    both = sorted(sides[0].keys() & sides[1].keys()) or [generation(engine)]
    data = {GENERATION: str(both[0])} if both[0] else {}
    for prefix, number in zip(("", NEXT), both, strict=False):
        theirs = sides[1].get(number, "")
        data[f"{prefix}engine.secret"] = read(engine, f"{sides[0][number]}engine.secret")
        data[f"{prefix}gateway.secret"] = read(gateway, f"{theirs}gateway.secret")
        data[prefix + labels.ADMIN_TOKEN] = read(gateway, theirs + labels.ADMIN_TOKEN)
    notes = _notes(engine)
    if (
        sides[0].keys() != sides[1].keys()
    ):  # it was lost between two writes: what was asked for is asked again
        notes = {key: value for key, value in notes.items() if key == labels.KEYS_MADE}
    return _secret(service, child_names.root_keys_secret(service.name), "keys", data, notes)


def corrected(
    live: Mapping[str, Any], wanted: Mapping[str, Any], root: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The patch that makes a mounted Secret what follows from the root; None when it is.

    Raises:
        ValueError: the two have no key in common, so pods hold others than the root; says what to delete.
    """
    if live.get("data") == wanted["data"]:
        return None
    ours = {key: value for key, value in wanted["data"].items() if key.endswith(".secret")}
    theirs = {value for key, value in data_of(live).items() if key.endswith(".secret")}
    if not theirs & set(ours.values()):
        name, other = live["metadata"]["name"], root["metadata"]["name"]
        raise ValueError(
            f"Secret {name} does not match Secret {other}: delete Secret {name}, and once it is back all "
            "pods of the service, which start with the new keys"
        )
    return _patch(
        live, wanted["metadata"].get("annotations", {}), {**dict.fromkeys(data_of(live)), **wanted["data"]}
    )


def _prefixes(secret: Mapping[str, Any]) -> tuple[str, ...]:
    return ("", NEXT) if rotating(secret) else ("",)


def _numbered(secret: Mapping[str, Any]) -> dict[str, str]:
    number = generation(secret)
    return {GENERATION: str(number)} if number else {}


def _notes(secret: Mapping[str, Any]) -> dict[str, str]:
    """What annotations of a Secret say of its keys."""
    names = (labels.ROTATE_KEYS, labels.KEYS_MADE, labels.NEXT_KEYS_MADE)
    found = {name: annotation(secret, name) for name in names}
    return {name: value for name, value in found.items() if value}


def _patch(
    secret: Mapping[str, Any], notes: Mapping[str, str | None], data: Mapping[str, str | None]
) -> dict[str, Any]:
    """A merge patch of this very version of a Secret."""
    version = secret["metadata"].get("resourceVersion")
    meta = {"annotations": dict(notes), **({"resourceVersion": version} if version else {})}
    return {"metadata": meta, "data": dict(data)}


def _secret(
    service: InferenceService,
    name: str,
    component: str,
    data: Mapping[str, str],
    notes: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(service, name, component, annotations=notes),
        "type": "Opaque",
        "data": {key: encode(value) for key, value in data.items()},
    }
