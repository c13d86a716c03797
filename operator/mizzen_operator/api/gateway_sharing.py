"""Which services share a gateway, which names are whose, and whose settings are in force: pure arithmetic.

The services of a namespace that ask for `spec.gateway.mode: Shared` have one gateway. The oldest of them
comes first in everything: its `spec.gateway` is in force, and a name that two claim is the older one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from mizzen_operator.api.types import Gateway, InferenceService


@dataclass(frozen=True, slots=True)
class GatewaySharing:
    """The services that share a gateway.

    Attributes:
        services: the oldest first; at least one.
        models: names of the model that each service has, by the service's name; the chief one first.
        taken: for each service, the names that it claims and another has: name to the other's name.
    """

    services: tuple[InferenceService, ...]
    model_names: Mapping[str, tuple[str, ...]]
    conflicting_names: Mapping[str, Mapping[str, str]]

    @property
    def oldest(self) -> InferenceService:
        """Whose `spec.gateway` is in force."""
        return self.services[0]

    @property
    def drain_timeout(self) -> int:
        """Seconds that requests of any of the services may need to end."""
        return max(service.lifecycle.drain_timeout for service in self.services)

    def overridden_fields(self, service: InferenceService) -> list[str]:
        """Fields of a service's `spec.gateway` that differ from those in force."""
        return _differing_fields(service.gateway, self.oldest.gateway)


def resolve_sharing(services: Sequence[InferenceService]) -> GatewaySharing | None:
    """Say who has what among the services of one namespace; None when none shares a gateway."""
    sharing = [service for service in services if service.shared and not service.deleting]
    if not sharing:
        return None
    sharing.sort(key=lambda service: (service.created, service.name))
    owners: dict[str, str] = {}
    models: dict[str, tuple[str, ...]] = {}
    taken: dict[str, dict[str, str]] = {}
    for service in sharing:
        claimed = dict.fromkeys((service.model.served_name, *service.model.aliases))
        for name in claimed:
            owners.setdefault(name, service.name)
        models[service.name] = tuple(name for name in claimed if owners[name] == service.name)
        taken[service.name] = {name: owners[name] for name in claimed if owners[name] != service.name}
    return GatewaySharing(tuple(sharing), models, taken)


_FIELDS = {
    "replicas": "replicas",
    "service_type": "service.type",
    "port": "service.port",
    "annotations": "service.annotations",
    "api_keys": "apiKeys",
    "tls_secret": "tls",
    "cors_origins": "cors",
    "admission": "admission",
    "keys_from_label": "apiKeys",
    "processes": "processes",
    "resources": "resources",
    "load_factor_percent": "routing",
    "warmup_tokens": "routing",
    "warmup_timeout": "routing",
    "retries": "retries",
    "tool_parser": "toolParser",
    "reasoning_parser": "reasoningParser",
    "access_log": "accessLog",
    "extra_args": "extraArgs",
}


def _differing_fields(mine: Gateway, theirs: Gateway) -> list[str]:
    names = [field.name for field in fields(Gateway)]
    return list(
        dict.fromkeys(_FIELDS[name] for name in names if getattr(mine, name) != getattr(theirs, name))
    )
