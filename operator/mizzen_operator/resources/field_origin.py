"""Which field of a service a field of its engine pods comes from, in what the API server says of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mizzen_operator.api.types import InferenceService

_PATH = re.compile(r"(?<![\w.])(?:metadata|spec)\.\w+(?:\.\w+|\[[^\]\s]*\])*")
_GO_FIELD = re.compile(r"Go struct field \w+\.")
_HEAD = re.compile(r'^Pod "[^"]*" is invalid: |^Pod in version "v1" cannot be handled as a Pod: ')
_PLAIN = (
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
_SHARED_MEMORY = "mizzen-shm"


def in_words_of(service: InferenceService, pod: Mapping[str, Any], message: str) -> str:
    """What the API server says of a pod, with the service's fields in place of the pod's.

    Args:
        service: what the pod is made of.
        pod: as it was sent.
        message: the API server's; what is not the user's keeps its name.
    """
    plain = _GO_FIELD.sub("field ", _HEAD.sub("", message))
    return _PATH.sub(lambda match: origin(service, pod, match[0]), plain)


def origin(service: InferenceService, pod: Mapping[str, Any], path: str) -> str:
    """The field of a service that a pod's field comes from; the pod's own where it comes from none."""
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
    for theirs, ours, sent, given in lists:
        if match := re.match(re.escape(theirs) + r"\[(\d+)\]", path):
            place = int(match[1]) - (len(sent) - len(given))  # the user's come last
            if place >= 0:
                return f"{ours}[{place}]{path[match.end() :]}"
            shared_memory = sent[int(match[1])]["name"] == _SHARED_MEMORY
            return f"{_OVERLAY}.sharedMemorySizeLimit" if shared_memory else path
    for theirs, ours in _RENAMED.items():
        if path == theirs or path.startswith((f"{theirs}.", f"{theirs}[")):
            return ours + path[len(theirs) :]
    return path


_RENAMED = {
    "metadata.annotations": f"{_OVERLAY}.annotations",
    "metadata.labels": f"{_OVERLAY}.labels",
    "spec.containers[0].image": "spec.engine.image",
    "spec.containers[0].resources": f"{_OVERLAY}.resources",
    "spec.nodeSelector": "spec.accelerator.nodeSelector",
    "spec.volumes": f"{_OVERLAY}.volumes",
    **{f"spec.{name}": f"{_OVERLAY}.{name}" for name in _PLAIN},
}
