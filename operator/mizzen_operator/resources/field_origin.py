# SPDX-License-Identifier: Apache-2.0
"""Translates paths of pod fields, in the API server's messages, to fields of the InferenceService."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mizzen_operator.api.types import InferenceService

_PATH = re.compile(r"(?<![\w.])(?:metadata|spec)\.\w+(?:\.\w+|\[[^\]\s]*\])*")
_GO_FIELD = re.compile(r"Go struct field \w+\.")
_PREFIX = re.compile(r'^Pod "[^"]*" is invalid: |^Pod in version "v1" cannot be handled as a Pod: ')
_OVERLAY_FIELDS = (
    "affinity",
    "imagePullSecrets",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "serviceAccountName",
    "tolerations",
    "topologySpreadConstraints",
)
_OVERLAY = "spec.podTemplate"
_PROFILE_FIELDS = (
    "spec.accelerator.nodeSelector",
    f"{_OVERLAY}.runtimeClassName",
    f"{_OVERLAY}.tolerations",
    "RuntimeClass",
)
"""Fields that an accelerator profile may set, and the word that an admission plugin uses for one of them."""
_SHARED_MEMORY = "mizzen-shm"


def translate_message(service: InferenceService, pod: Mapping[str, Any], message: str) -> str:
    """Return an API server's message about a pod, with paths of pod fields replaced by fields of the service.

    Args:
        service: the service that the pod belongs to.
        pod: the pod as it was sent to the API server.
        message: the API server's message; paths that do not come from the service stay unchanged.

    Returns:
        The message with the service's fields. If an accelerator profile may set one of them, the message
        names the profile.
    """
    plain = _GO_FIELD.sub("field ", _PREFIX.sub("", message))
    translated = _PATH.sub(lambda match: service_field(service, pod, match[0]), plain)
    if service.profile and any(field in translated for field in _PROFILE_FIELDS):
        return f"{translated} (the accelerator profile {service.profile} may set this field)"
    return translated


def service_field(service: InferenceService, pod: Mapping[str, Any], path: str) -> str:
    """Return the path of the service's field that sets a pod's field; `path` itself if no field sets it."""
    container, overlay = pod["spec"]["containers"][0], service.pod_template
    lists = (
        ("spec.volumes", f"{_OVERLAY}.volumes", pod["spec"]["volumes"], overlay["volumes"]),
        (
            "spec.containers[0].volumeMounts",
            f"{_OVERLAY}.volumeMounts",
            container["volumeMounts"],
            overlay["volumeMounts"],
        ),
        ("spec.containers[0].env", "spec.engine.env", container["env"], service.engine.env),
    )
    for pod_field, our_field, sent, users in lists:
        if match := re.match(re.escape(pod_field) + r"\[(\d+)\]", path):
            index = int(match[1]) - (len(sent) - len(users))  # the user's entries come last
            if index >= 0:
                return f"{our_field}[{index}]{path[match.end() :]}"
            shared_memory = sent[int(match[1])]["name"] == _SHARED_MEMORY
            return f"{_OVERLAY}.sharedMemorySizeLimit" if shared_memory else path
    for pod_field, our_field in _RENAMED.items():
        if path == pod_field or path.startswith((f"{pod_field}.", f"{pod_field}[")):
            return our_field + path[len(pod_field) :]
    return path


_RENAMED = {
    "metadata.annotations": f"{_OVERLAY}.annotations",
    "metadata.labels": f"{_OVERLAY}.labels",
    "spec.containers[0].image": "spec.engine.image",
    "spec.containers[0].resources": f"{_OVERLAY}.resources",
    "spec.nodeSelector": "spec.accelerator.nodeSelector",
    "spec.volumes": f"{_OVERLAY}.volumes",
    **{f"spec.{name}": f"{_OVERLAY}.{name}" for name in _OVERLAY_FIELDS},
}
