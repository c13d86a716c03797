"""Reads the API objects that pods use: Secrets, ConfigMaps, their own fields, service account tokens."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from mizzen_local.api import Api, ApiError

SUBSCRIPT = re.compile(r"^metadata\.(labels|annotations)\['(.+)'\]$")
KINDS = {"secret": "secrets", "configMap": "configmaps"}


class MissingError(Exception):
    """Something that a pod refers to is not there (yet)."""


def field(pod: Mapping[str, Any], path: str) -> str:
    """A `fieldRef` of a pod, as text; maps come as lines of `key="value"`.

    Raises:
        MissingError: Kubernetes knows no such field.
    """
    if found := SUBSCRIPT.match(path):
        return pod["metadata"].get(found[1], {}).get(found[2], "")
    if path == "status.podIPs":
        return ",".join(entry["ip"] for entry in pod["status"].get("podIPs", ()))
    if path == "status.hostIPs":
        return ",".join(entry["ip"] for entry in pod["status"].get("hostIPs", ()))
    value: Any = pod
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        return "\n".join(f'{key}="{text}"' for key, text in sorted(value.items()))
    if value is None and path.partition(".")[0] not in ("metadata", "spec", "status"):
        raise MissingError(f"fieldPath {path!r} is not known")
    return "" if value is None else str(value)


class Sources:
    """The objects of one pod's namespace that it names, read when they are needed."""

    def __init__(self, api: Api, pod: Mapping[str, Any]) -> None:
        self._api = api
        self._pod = pod["metadata"]
        self._account = pod["spec"].get("serviceAccountName") or "default"
        self._base = f"/api/v1/namespaces/{self._pod['namespace']}"

    async def data(self, kind: str, reference: Mapping[str, Any]) -> dict[str, bytes]:
        """Keys and values of a Secret or ConfigMap; empty when it is optional and not there.

        Args:
            kind: `secret` or `configMap`.
            reference: has `name` (or `secretName`) and maybe `optional`.

        Raises:
            MissingError: it is not there.
        """
        name = reference.get("name") or reference.get("secretName", "")
        try:
            found = await self._api.get(f"{self._base}/{KINDS[kind]}/{name}")
        except ApiError as error:
            # The node authorizer forbids what it does not see a pod of this node refer to yet.
            if error.status == 404 and reference.get("optional"):
                return {}
            if error.status in (403, 404):
                raise MissingError(f'{KINDS[kind]} "{name}" not found') from error
            raise
        if kind == "secret":
            return {key: base64.b64decode(value) for key, value in found.get("data", {}).items()}
        plain = {key: value.encode() for key, value in found.get("data", {}).items()}
        return plain | {key: base64.b64decode(value) for key, value in found.get("binaryData", {}).items()}

    async def token(self, projection: Mapping[str, Any]) -> bytes:
        """A token of the pod's service account, bound to the pod."""
        spec: dict[str, Any] = {
            "expirationSeconds": projection.get("expirationSeconds", 3600),
            "boundObjectRef": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": self._pod["name"],
                "uid": self._pod["uid"],
            },
        }
        if audience := projection.get("audience"):
            spec["audiences"] = [audience]
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        try:
            answer = await self._api.create(f"{self._base}/serviceaccounts/{self._account}/token", request)
        except ApiError as error:
            if error.status in (403, 404):
                raise MissingError(f"serviceaccount {self._account!r}: {error}") from error
            raise
        return answer["status"]["token"].encode()
