# SPDX-License-Identifier: Apache-2.0
"""Checks by a dry run whether the API server accepts the pods of a revision, before a group is created.

Some podTemplate fields, such as `affinity`, have no schema in the CRD, so that `kubectl apply` accepts
anything there; and the API server silently drops unknown fields of a pod, unless field validation is strict.
Therefore each revision gets one strict dry run. Rejections that have other causes besides the spec, such as
a quota, are reported only when the pods are created.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mizzen_operator.api import reasons
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import BlockingReason, KubeError
from mizzen_operator.resources.engine_pod import engine_pods
from mizzen_operator.resources.field_origin import service_field, translate_message

_STRICT = "strict decoding error"
_UNREADABLE = "cannot be handled as a Pod"
_UNKNOWN_FIELD = re.compile(r'unknown field "([^"]+)"')
_FINAL_CODES = (400, 403, 409, 422)
"""HTTP status codes after which a dry run is not repeated: it would reveal nothing new about the spec."""


class PodDryRun:
    """Runs one dry run per service and revision."""

    def __init__(self, kube: KubeClient, config: OperatorConfig) -> None:
        self._kube = kube
        self._config = config
        self._passed: dict[ServiceKey, tuple[str, str]] = {}
        """For each service, its uid and the revision whose dry run last found no fault."""

    def forget(self, key: ServiceKey) -> None:
        """Drop the result of a deleted service."""
        self._passed.pop(key, None)

    async def check(self, service: InferenceService, revision: str) -> BlockingReason | None:
        """Return why the API server would reject or change a revision's pods; None if no fault is known."""
        key, identity = ServiceKey(service.namespace, service.name), (service.uid, revision)
        if self._passed.get(key) == identity or not _needs_dry_run(service):
            return None
        pod = engine_pods(service, self._config, revision=revision, group=0, attempt=0)[0]
        try:
            await self._kube.dry_run_create(pod, strict=True)
        except KubeError as error:
            if message := _describe_rejection(service, pod, error):
                return BlockingReason(reasons.POD_REJECTED, message)
            if error.code not in _FINAL_CODES:
                return None
        self._passed[key] = identity
        return None


def _needs_dry_run(service: InferenceService) -> bool:
    """Return whether a spec sets a pod field that the CRD's schema does not validate completely."""
    fields = ("annotations", "labels", "resources", "tolerations", "topologySpreadConstraints", "volumes")
    return bool(
        service.pod_template.get("affinity")
        or service.accelerator.node_selector
        or any(service.pod_template[field] for field in fields)
    )


def _describe_rejection(service: InferenceService, pod: Mapping[str, Any], error: KubeError) -> str:
    """Return what is wrong with a pod, in terms of the service's fields; empty if the spec may be correct."""
    text = str(error)
    if _STRICT in text:
        paths = [(path, service_field(service, pod, path)) for path in _UNKNOWN_FIELD.findall(text)]
        unknown = ", ".join(field for path, field in paths if field != path)
        return f"a pod has no such field: {unknown}; correct its name, or remove it" if unknown else ""
    if error.reason == "Invalid" or _UNREADABLE in text:
        return f"the API server rejects the pod: {translate_message(service, pod, text)}"
    return ""
