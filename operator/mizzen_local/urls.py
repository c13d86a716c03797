# SPDX-License-Identifier: Apache-2.0
"""URLs at which this machine reaches services of the cluster."""

from __future__ import annotations

from urllib.parse import urlsplit

from mizzen_local.errors import LocalError
from mizzen_local.kubectl import Kubectl, KubectlError


class NoUrlError(LocalError):
    """A service does not exist, or has no URL (yet); the message says which of the two is the case."""


def service_url(kubectl: Kubectl, name: str, namespace: str) -> str:
    """Return the base URL of an InferenceService (ending in /v1), or the URL of a Service of that name.

    Args:
        kubectl: the cluster's kubectl.
        name: name of the InferenceService or Service.
        namespace: its namespace.

    Raises:
        NoUrlError: neither exists, or the one that exists has no address.
    """
    try:
        inference = kubectl.json("get", "inferenceservices.mizzen.dev", name, "-n", namespace)
    except KubectlError as error:
        if not _is_not_found(error):
            raise
        return _service_address(kubectl, name, namespace, port=None)
    url = urlsplit(inference.get("status", {}).get("url", ""))
    if not url.hostname:
        raise NoUrlError(
            f"InferenceService {namespace}/{name} has no URL yet; kubectl describe infsvc {name} says why"
        )
    address = _service_address(kubectl, url.hostname.split(".")[0], namespace, port=url.port)
    return url.scheme + address.removeprefix("http") + url.path


def _service_address(kubectl: Kubectl, name: str, namespace: str, *, port: int | None) -> str:
    try:
        service = kubectl.json("get", "service", name, "-n", namespace)
    except KubectlError as error:
        if not _is_not_found(error):
            raise
        raise NoUrlError(f"there is no InferenceService and no Service {namespace}/{name}") from None
    address = service["spec"].get("clusterIP", "None")
    if address in ("", "None"):
        raise NoUrlError(f"Service {namespace}/{name} is headless and has no address")
    return f"http://{address}:{port or service['spec']['ports'][0]['port']}"


def _is_not_found(error: KubectlError) -> bool:
    return "(NotFound)" in error.message or "doesn't have a resource type" in error.message
