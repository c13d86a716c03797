"""Whether the API server would take a revision's pods: asked before anything is made, or goes, for them.

What a podTemplate has without a schema, such as an affinity, is taken by `kubectl apply` whatever it is. The
API server drops a field of a pod that it does not know, unless it is asked to be strict: so it is asked once,
by a dry run. What depends on more than the spec, such as a quota, is left to the pods themselves.
"""

from __future__ import annotations

import re

from mizzen_operator.api.key import Key
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.client import Kube, KubeError
from mizzen_operator.kube.errors import Failure
from mizzen_operator.resources.engine_pod import engine_pods
from mizzen_operator.resources.field_origin import in_words_of, origin

_STRICT = "strict decoding error"
_UNREADABLE = "cannot be handled as a Pod"
_UNKNOWN = re.compile(r'unknown field "([^"]+)"')
_SAID_OF_THE_POD = (400, 403, 409, 422)
"""Answers after which the same question would get the same one, as far as it is the spec's doing."""


class Rehearsal:
    """Asks for each service once a revision."""

    def __init__(self, kube: Kube, config: OperatorConfig) -> None:
        self._kube = kube
        self._config = config
        self._passed: dict[Key, tuple[str, str]] = {}
        """Uid and revision."""

    def forget(self, key: Key) -> None:
        """A service is gone."""
        self._passed.pop(key, None)

    async def refusal(self, service: InferenceService, revision: str) -> Failure | None:
        """Why no pod of a revision can be what the spec asks for; None when nothing is known to be wrong."""
        key, asked = Key(service.namespace, service.name), (service.uid, revision)
        if self._passed.get(key) == asked or not _has_free_parts(service):
            return None
        pod = engine_pods(service, self._config, revision=revision, group=0, incarnation=0)[0]
        try:
            await self._kube.check(pod, strict=True)
        except KubeError as error:
            if words := _wrong(service, pod, error):
                return Failure("PodRejected", words)
            if error.code not in _SAID_OF_THE_POD:
                return None
        self._passed[key] = asked
        return None


def _has_free_parts(service: InferenceService) -> bool:
    """Whether a service gives its pods what the CRD's schema cannot check whole."""
    parts = ("annotations", "labels", "resources", "tolerations", "topologySpreadConstraints", "volumes")
    return bool(
        service.pod_template.get("affinity")
        or service.accelerator.node_selector
        or any(service.pod_template[part] for part in parts)
    )


def _wrong(service: InferenceService, pod: dict[str, object], error: KubeError) -> str:
    """What is wrong with a pod, in words of its service; empty where the spec may be right."""
    text = str(error)
    if _STRICT in text:
        paths = [(path, origin(service, pod, path)) for path in _UNKNOWN.findall(text)]
        unknown = ", ".join(field for path, field in paths if field != path)
        return f"a pod has no such field: {unknown}; correct its name, or remove it" if unknown else ""
    if error.reason == "Invalid" or _UNREADABLE in text:
        return f"the API server takes no such pod: {in_words_of(service, pod, text)}"
    return ""
