# SPDX-License-Identifier: Apache-2.0
"""Lists the Secrets, ConfigMaps and claims that pods need, with the spec field that names each. Pure.

While a pod waits, the reconciler checks whether these objects exist: a kubelet reports a missing one only in
Events, which the operator has no permission to read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mizzen_operator.api.types import Gateway, InferenceService

SECRET, CONFIG_MAP, CLAIM = "Secret", "ConfigMap", "PersistentVolumeClaim"
_NOT_FOUND = re.compile(r'\b(secret|configmap|persistentvolumeclaim)s? "([^"]+)" not found', re.IGNORECASE)
_NO_KEY = re.compile(r"couldn't find key \S+ in (Secret|ConfigMap) [^/\s]+/([^\s,;]+)")
_REMEDIES = ((_NOT_FOUND, "create it in the service's namespace"), (_NO_KEY, "add the key to it"))


@dataclass(frozen=True, slots=True)
class RequiredRef:
    """An object without which a pod does not start; `field` is the path of the spec field that names it."""

    kind: str
    name: str
    field: str

    @property
    def message(self) -> str:
        """Message for a condition if the object does not exist."""
        return (
            f"{self.kind} {self.name} does not exist, and no pod starts without it: create it in the "
            f"service's namespace, or correct {self.field}"
        )


def engine_refs(service: InferenceService) -> list[RequiredRef]:
    """Return the objects that engine pods need, in the order of the spec."""
    model, cache = service.spec.get("model", {}), service.access.cache
    refs = fetch_refs(service) if cache.mode == "HostPath" else _cache_refs(service)
    if str(model.get("source", "")).startswith("pvc://"):
        claim = model["source"].removeprefix("pvc://").partition("/")[0]
        refs.append(RequiredRef(CLAIM, claim, "spec.model.source"))
    for index, variable in enumerate(service.engine.env):
        refs += _variable_refs(variable.get("valueFrom") or {}, f"spec.engine.env[{index}].valueFrom")
    for index, volume in enumerate(service.pod_template.get("volumes", ())):
        refs += _volume_refs(volume, f"spec.podTemplate.volumes[{index}]")
    return refs


def fetch_refs(service: InferenceService) -> list[RequiredRef]:
    """Return the objects that a pod needs to fetch the model."""
    credentials, field = service.access.credentials, "spec.model.credentialsSecretRef.name"
    secrets = [RequiredRef(SECRET, credentials[0], field)] if credentials is not None else []
    return [*secrets, *_cache_refs(service)]


def gateway_refs(gateway: Gateway) -> list[RequiredRef]:
    """Return the objects that gateway pods need."""
    refs = [
        RequiredRef(SECRET, name, f"spec.gateway.apiKeys.secretNames[{index}]")
        for index, name in enumerate(gateway.api_keys)
    ]
    if gateway.tls_secret:
        refs.append(RequiredRef(SECRET, gateway.tls_secret, "spec.gateway.tls.secretName"))
    return refs


def explain_missing_ref(message: str, refs: Sequence[RequiredRef]) -> str:
    """Return a message about a waiting pod; if an object of `refs` is missing, add its field and a remedy.

    Args:
        message: Kubernetes' message about the pod.
        refs: the objects that the pod needs.
    """
    for pattern, remedy in _REMEDIES:
        match = pattern.search(message)
        if match is None:
            continue
        kind, name = match.groups()
        fields = [ref.field for ref in refs if (ref.kind.lower(), ref.name) == (kind.lower(), name)]
        if fields:
            return f"{message}; {fields[0]} names it: {remedy}, or correct the field"
    return message


def _cache_refs(service: InferenceService) -> list[RequiredRef]:
    """Return the PersistentVolumeClaim of the model's cache if the user must create it; otherwise []."""
    cache = service.access.cache
    existing = cache.claim and not cache.size
    return [RequiredRef(CLAIM, cache.claim, "spec.model.cache.claimName")] if existing else []


def _variable_refs(source: Mapping[str, Any], field: str) -> Iterator[RequiredRef]:
    for key, kind in (("secretKeyRef", SECRET), ("configMapKeyRef", CONFIG_MAP)):
        yield from _required_ref(source.get(key), "name", kind, f"{field}.{key}")


def _volume_refs(volume: Mapping[str, Any], field: str) -> Iterator[RequiredRef]:
    yield from _required_ref(volume.get("secret"), "secretName", SECRET, f"{field}.secret")
    yield from _required_ref(volume.get("configMap"), "name", CONFIG_MAP, f"{field}.configMap")
    yield from _required_ref(
        volume.get("persistentVolumeClaim"), "claimName", CLAIM, f"{field}.persistentVolumeClaim"
    )
    for index, source in enumerate((volume.get("projected") or {}).get("sources") or ()):
        path = f"{field}.projected.sources[{index}]"
        yield from _required_ref(source.get("secret"), "name", SECRET, f"{path}.secret")
        yield from _required_ref(source.get("configMap"), "name", CONFIG_MAP, f"{path}.configMap")


def _required_ref(source: Mapping[str, Any] | None, key: str, kind: str, field: str) -> Iterator[RequiredRef]:
    if source and source.get(key) and not source.get("optional"):
        yield RequiredRef(kind, source[key], f"{field}.{key}")
