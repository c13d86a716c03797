"""URLs of services as this machine reaches them."""

from __future__ import annotations

from urllib.parse import urlsplit

from mizzen_local.errors import LocalError
from mizzen_local.kubectl import Kubectl, KubectlError


class NoUrlError(LocalError):
    """A service has no URL (yet); the message says why."""


def service_url(kubectl: Kubectl, name: str, namespace: str) -> str:
    """The base URL of an InferenceService (ending in /v1), or the URL of a Service of that name.

    Raises:
        NoUrlError: there is neither, or it has no address.
    """
    try:
        inference = kubectl.json("get", "inferenceservices.mizzen.dev", name, "-n", namespace)
    except KubectlError as error:
        if not _absent(error):
            raise
        return _address(kubectl, name, namespace, port=None)
    url = urlsplit(inference.get("status", {}).get("url", ""))
    if not url.hostname:
        raise NoUrlError(
            f"InferenceService {namespace}/{name} has no URL yet; kubectl describe infsvc {name} says why"
        )
    address = _address(kubectl, url.hostname.split(".")[0], namespace, port=url.port)
    return url.scheme + address.removeprefix("http") + url.path


def _address(kubectl: Kubectl, name: str, namespace: str, *, port: int | None) -> str:
    try:
        service = kubectl.json("get", "service", name, "-n", namespace)
    except KubectlError as error:
        if not _absent(error):
            raise
        raise NoUrlError(f"there is no InferenceService and no Service {namespace}/{name}") from None
    address = service["spec"].get("clusterIP", "None")
    if address in ("", "None"):
        raise NoUrlError(f"Service {namespace}/{name} is headless and has no address")
    return f"http://{address}:{port or service['spec']['ports'][0]['port']}"


def _absent(error: KubectlError) -> bool:
    return "(NotFound)" in error.message or "doesn't have a resource type" in error.message
