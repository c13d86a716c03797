"""Secrets, ConfigMaps and claims that a spec names: which field names what a pod waits for. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mizzen_operator.api.types import Gateway, InferenceService

SECRET, CONFIG_MAP, CLAIM = "Secret", "ConfigMap", "PersistentVolumeClaim"
_NOT_FOUND = re.compile(r'\b(secret|configmap|persistentvolumeclaim)s? "([^"]+)" not found', re.IGNORECASE)
_NO_KEY = re.compile(r"couldn't find key \S+ in (Secret|ConfigMap) [^/\s]+/([^\s,;]+)")
_PATTERNS = ((_NOT_FOUND, "create it in the service's namespace"), (_NO_KEY, "add the key to it"))


@dataclass(frozen=True, slots=True)
class Need:
    """An object that pods do not start without, and the field that names it."""

    kind: str
    name: str
    field: str

    @property
    def words(self) -> str:
        """That it is not there, and what to do."""
        return (
            f"{self.kind} {self.name} is not there, and no pod starts without it: create it in the service's "
            f"namespace, or correct {self.field}"
        )


def engine_needs(service: InferenceService) -> list[Need]:
    """What the engines' pods do not start without, in the order of the spec."""
    model, cache = service.spec.get("model", {}), service.access.cache
    found = fetch_needs(service) if cache.mode == "HostPath" else _cache_needs(service)
    if str(model.get("source", "")).startswith("pvc://"):
        claim = model["source"].removeprefix("pvc://").partition("/")[0]
        found.append(Need(CLAIM, claim, "spec.model.source"))
    for index, one in enumerate(service.engine.env):
        found += _of_value(one.get("valueFrom") or {}, f"spec.engine.env[{index}].valueFrom")
    for index, volume in enumerate(service.pod_template.get("volumes", ())):
        found += _of_volume(volume, f"spec.podTemplate.volumes[{index}]")
    return found


def fetch_needs(service: InferenceService) -> list[Need]:
    """What the pod that fetches the model does not start without."""
    credentials, field = service.access.credentials, "spec.model.credentialsSecretRef.name"
    secrets = [Need(SECRET, credentials[0], field)] if credentials is not None else []
    return [*secrets, *_cache_needs(service)]


def _cache_needs(service: InferenceService) -> list[Need]:
    cache = service.access.cache
    own = cache.claim and not cache.size  # else it is made where it is missing
    return [Need(CLAIM, cache.claim, "spec.model.cache.claimName")] if own else []


def gateway_needs(gateway: Gateway) -> list[Need]:
    """What the gateway's pods do not start without."""
    found = [
        Need(SECRET, name, f"spec.gateway.apiKeys.secretNames[{index}]")
        for index, name in enumerate(gateway.api_keys)
    ]
    if gateway.tls_secret:
        found.append(Need(SECRET, gateway.tls_secret, "spec.gateway.tls.secretName"))
    return found


def explained(message: str, needs: Sequence[Need]) -> str:
    """Kubernetes' words for why a pod waits, with the field that names what is missing, where one does."""
    for pattern, what in _PATTERNS:
        match = pattern.search(message)
        if match is None:
            continue
        kind, name = match.groups()
        fields = [one.field for one in needs if (one.kind.lower(), one.name) == (kind.lower(), name)]
        if fields:
            return f"{message}; {fields[0]} names it: {what}, or correct the field"
    return message


def _of_value(source: Mapping[str, Any], field: str) -> Iterator[Need]:
    for key, kind in (("secretKeyRef", SECRET), ("configMapKeyRef", CONFIG_MAP)):
        yield from _named(source.get(key), "name", kind, f"{field}.{key}")


def _of_volume(volume: Mapping[str, Any], field: str) -> Iterator[Need]:
    yield from _named(volume.get("secret"), "secretName", SECRET, f"{field}.secret")
    yield from _named(volume.get("configMap"), "name", CONFIG_MAP, f"{field}.configMap")
    yield from _named(
        volume.get("persistentVolumeClaim"), "claimName", CLAIM, f"{field}.persistentVolumeClaim"
    )
    for index, source in enumerate((volume.get("projected") or {}).get("sources") or ()):
        place = f"{field}.projected.sources[{index}]"
        yield from _named(source.get("secret"), "name", SECRET, f"{place}.secret")
        yield from _named(source.get("configMap"), "name", CONFIG_MAP, f"{place}.configMap")


def _named(source: Mapping[str, Any] | None, key: str, kind: str, field: str) -> Iterator[Need]:
    if source and source.get(key) and not source.get("optional"):
        yield Need(kind, source[key], f"{field}.{key}")
