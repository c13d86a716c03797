"""What a group should run, as a name: groups of another name are replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from mizzen_operator.api.types import Availability, InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.objects import digest
from mizzen_operator.resources.fetch_job import cache_place


def engine_image(service: InferenceService, config: OperatorConfig) -> str:
    """The engine's image in force."""
    return service.engine.image or config.engine_image


def revision(service: InferenceService, config: OperatorConfig) -> str:
    """Name of what the groups should run: eight hexadecimal digits, equal for equal specs.

    It covers the fields of the spec that reach the engine and the image in force, not how this release
    renders them. Empty values are left out, so that a newer CRD may add fields without replacing groups.
    """
    model = replace(service.model, aliases=())
    fields = {
        "image": engine_image(service, config),
        "tensor": service.tensor,
        "podTemplate": service.pod_template,
        "spread": service.availability.spread_key,
        **({"pods": service.pods} if service.pods > 1 else {}),
        **({"topology": service.topology_key} if service.topology_key else {}),
        **{
            name: asdict(part)
            for name, part in (
                ("model", model),
                ("accelerator", service.accelerator),
                ("engine", replace(service.engine, image="")),
                ("lifecycle", service.lifecycle),
            )
        },
    }
    del fields["lifecycle"]["max_group_restarts"]
    if service.access.cached:
        fields["place"] = cache_place(service)
    for part, defaults in _LATER_FIELDS.items():
        for name, default in defaults.items():
            if fields[part][name] == default:
                del fields[part][name]
    if fields["spread"] == Availability().spread_key:
        del fields["spread"]
    return digest(_pruned(fields))[:8]


_LATER_FIELDS: dict[str, dict[str, Any]] = {
    "engine": {
        "kv_cache_dtype": "Auto",
        "overlap_scheduling": "Enabled",
        "cuda_graph": "Auto",
        "cuda_graph_max_batch": 512,
    },
}
"""Fields that came after the first release, with their defaults: they must not replace groups by coming."""


def _pruned(value: Any) -> Any:
    if isinstance(value, Mapping):
        pruned = {key: _pruned(item) for key, item in value.items()}
        return {key: item for key, item in pruned.items() if item not in ({}, [], "", None)}
    if isinstance(value, (list, tuple)):
        return [_pruned(item) for item in value]
    return value
