# SPDX-License-Identifier: Apache-2.0
"""Computes the name of a spec's revision; groups of another revision are replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from mizzen_operator.api.types import Availability, InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.objects import digest
from mizzen_operator.resources.fetch_job import cache_location


def engine_image(service: InferenceService, config: OperatorConfig) -> str:
    """Return the engine image of a service: the image in its spec, or else the operator's default image."""
    return service.engine.image or config.engine_image


def revision(service: InferenceService, config: OperatorConfig) -> str:
    """Return the revision's name: a hash of eight hexadecimal digits, equal for equal specs.

    It covers the engine image and the spec fields that reach the engine, but not how this release builds
    pods. It leaves out tracing, so that a change of a telemetry setting replaces no groups. Empty values are
    left out as well, so that a newer CRD can add fields without replacing groups.
    """
    model = replace(service.model, aliases=())
    fields = {
        "image": engine_image(service, config),
        "tensor": service.tensor,
        "expert": service.expert,
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
        fields["place"] = cache_location(service)
    for part, defaults in _LATER_FIELDS.items():
        for name, default in defaults.items():
            if fields[part][name] == default:
                del fields[part][name]
    if fields["spread"] == Availability().spread_key:
        del fields["spread"]
    return digest(_without_empty(fields))[:8]


_LATER_FIELDS: dict[str, dict[str, Any]] = {
    "model": {"implementation": "Auto"},
    "engine": {
        "kv_cache_dtype": "Auto",
        "quantization": "Auto",
        "overlap_scheduling": "Enabled",
        "cuda_graph": "Auto",
        "cuda_graph_max_batch": 512,
    },
}
"""Fields added after the first release, with their defaults.

The hash ignores such a field while it has its default, so adding the field to the CRD replaced no groups.
"""


def _without_empty(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {key: _without_empty(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item not in ({}, [], "", None)}
    if isinstance(value, (list, tuple)):
        return [_without_empty(item) for item in value]
    return value
