# SPDX-License-Identifier: Apache-2.0
"""Resolves which services share a gateway, which one owns each model name, and whose gateway settings apply.

Services of a namespace with `spec.gateway.mode: Shared` have one gateway. The oldest service takes
precedence: its `spec.gateway` applies, and a model name that two services claim belongs to the older one.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from mizzen_operator.api.types import Gateway, InferenceService


@dataclass(frozen=True, slots=True)
class GatewaySharing:
    """The services that share a gateway.

    Attributes:
        services: the services, oldest first; at least one.
        model_names: model names that each service owns, by service name; the served name comes first.
        conflicting_names: for each service, by its name: the model names that it claims but an older service
            owns, each mapped to the name of that older service.
    """

    services: tuple[InferenceService, ...]
    model_names: Mapping[str, tuple[str, ...]]
    conflicting_names: Mapping[str, Mapping[str, str]]

    @property
    def oldest(self) -> InferenceService:
        """Service whose `spec.gateway` applies."""
        return self.services[0]

    @property
    def drain_timeout(self) -> int:
        """Longest drain timeout of the services, in seconds."""
        return max(service.lifecycle.drain_timeout for service in self.services)

    def overridden_fields(self, service: InferenceService) -> list[str]:
        """Return the fields of a service's `spec.gateway` that differ from those of the oldest service."""
        return _differing_fields(service.gateway, self.oldest.gateway)


def resolve_sharing(services: Sequence[InferenceService]) -> GatewaySharing | None:
    """Return which services share a gateway, and which one owns each model name.

    Args:
        services: all services of one namespace; services that are being deleted do not count.

    Returns:
        The services that share a gateway; None if there are no such services.
    """
    sharing = [service for service in services if service.shares_gateway and not service.deleting]
    if not sharing:
        return None
    sharing.sort(key=lambda service: (service.created, service.name))
    owners: dict[str, str] = {}
    models: dict[str, tuple[str, ...]] = {}
    conflicting: dict[str, dict[str, str]] = {}
    for service in sharing:
        claimed = dict.fromkeys((service.model.served_name, *service.model.aliases))
        for name in claimed:
            owners.setdefault(name, service.name)
        models[service.name] = tuple(name for name in claimed if owners[name] == service.name)
        conflicting[service.name] = {name: owners[name] for name in claimed if owners[name] != service.name}
    return GatewaySharing(tuple(sharing), models, conflicting)


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
    "pod_template": "podTemplate",
    "resources": "resources",
    "load_factor_percent": "routing",
    "warmup_tokens": "routing",
    "warmup_timeout": "routing",
    "retries": "retries",
    "tool_parser": "toolParser",
    "reasoning_parser": "reasoningParser",
    "access_log": "accessLog",
    "moderation_categories": "moderation",
    "playground": "playground",
    "grpc": "grpc",
    "images": "images",
    "extra_args": "extraArgs",
}


def _differing_fields(mine: Gateway, theirs: Gateway) -> list[str]:
    names = [field.name for field in fields(Gateway)]
    return list(
        dict.fromkeys(_FIELDS[name] for name in names if getattr(mine, name) != getattr(theirs, name))
    )
