# SPDX-License-Identifier: Apache-2.0
"""Explains why no node fits a pod: names the fields of the service that set what the pod requests. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

from mizzen_operator.api.types import InferenceService

_INSUFFICIENT = re.compile(r"Insufficient ([A-Za-z0-9./-]*[A-Za-z0-9])")


def explain_unschedulable(service: InferenceService, message: str) -> str:
    """Return the scheduler's message about an engine pod, and the fields that it concerns.

    Args:
        service: the service.
        message: the scheduler's message.
    """
    accelerator, resource = service.accelerator, _with_profile(service, "spec.accelerator.resourceName")
    advice = [
        f"a pod requests {accelerator.per_pod} of {resource} ({name}): free or add such devices, or correct "
        "spec.accelerator.resourceName, perPod or spec.parallelism.tensor"
        if name == accelerator.resource_name
        else _describe_request(service, name)
        for name in dict.fromkeys(_INSUFFICIENT.findall(message))
    ]
    advice += [text(service) for part, text in _FIELDS if part in message]
    return "; ".join([message, *filter(None, advice)])


def _describe_request(service: InferenceService, name: str) -> str:
    resources = service.pod_template.get("resources", {})
    amounts = (resources.get(part, {}).get(name) for part in ("requests", "limits"))
    amount = next((f" {amount} of" for amount in amounts if amount is not None), "")
    return f"spec.podTemplate.resources requests{amount} {name}: lower it, or free or add a node with as much"


def _describe_selector(service: InferenceService) -> str:
    labels = ", ".join(f"{name}={value}" for name, value in service.accelerator.node_selector.items())
    field = _with_profile(service, "spec.accelerator.nodeSelector")
    selector = f"{field} ({labels})" if labels else ""
    affinity = "spec.podTemplate.affinity" if service.pod_template.get("affinity") else ""
    fields = " and ".join(filter(None, (selector, affinity)))
    return f"{fields} must match the labels of a node" if fields else ""


def _describe_tolerations(service: InferenceService) -> str:
    return f"{_with_profile(service, 'spec.podTemplate.tolerations')} can tolerate the taint"


def _with_profile(service: InferenceService, field: str) -> str:
    """Return the name of a field, and the accelerator profile if it may set the field's value."""
    return f"{field} or the accelerator profile {service.profile}" if service.profile else field


_FIELDS: tuple[tuple[str, Callable[[InferenceService], str]], ...] = (
    ("didn't match Pod's node affinity/selector", _describe_selector),
    ("untolerated taint", _describe_tolerations),
)
"""Parts of the scheduler's message, and functions that return the advice for each."""
