# SPDX-License-Identifier: Apache-2.0
"""Reads the Secrets, ConfigMaps and pod fields that pods refer to; requests service account tokens."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from mizzen_local.api import ApiClient, ApiError

SUBSCRIPT = re.compile(r"^metadata\.(labels|annotations)\['(.+)'\]$")
KINDS = {"secret": "secrets", "configMap": "configmaps"}


class MissingError(Exception):
    """A pod refers to something that does not exist (yet), or that this node does not support."""


def read_field(pod: Mapping[str, Any], path: str) -> str:
    """Return the value of a pod's field as text; a map becomes lines of `key="value"`.

    Args:
        pod: the pod.
        path: `fieldPath` of a `fieldRef`.

    Raises:
        MissingError: pods have no such field.
    """
    if match := SUBSCRIPT.match(path):
        return pod["metadata"].get(match[1], {}).get(match[2], "")
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


class PodSources:
    """Reads the objects that one pod refers to, from its namespace."""

    def __init__(self, api: ApiClient, pod: Mapping[str, Any]) -> None:
        self._api = api
        self._pod = pod["metadata"]
        self._account = pod["spec"].get("serviceAccountName") or "default"
        self._namespace_path = f"/api/v1/namespaces/{self._pod['namespace']}"

    async def read_data(self, kind: str, reference: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the data of a Secret or ConfigMap; empty if it is optional and does not exist.

        Args:
            kind: `secret` or `configMap`.
            reference: reference with `name` (or `secretName`), and possibly `optional`.

        Raises:
            MissingError: the object does not exist and is not optional, or the node is not yet permitted to
                read it.
        """
        name = reference.get("name") or reference.get("secretName", "")
        try:
            body = await self._api.get(f"{self._namespace_path}/{KINDS[kind]}/{name}")
        except ApiError as error:
            # 403: the node authorizer does not know yet that a pod of this node refers to the object.
            if error.status == 404 and reference.get("optional"):
                return {}
            if error.status in (403, 404):
                raise MissingError(f'{KINDS[kind]} "{name}" not found') from error
            raise
        if kind == "secret":
            return {key: base64.b64decode(value) for key, value in body.get("data", {}).items()}
        text_values = {key: value.encode() for key, value in body.get("data", {}).items()}
        return text_values | {
            key: base64.b64decode(value) for key, value in body.get("binaryData", {}).items()
        }

    async def request_token(self, projection: Mapping[str, Any]) -> bytes:
        """Request a token of the pod's service account; the token is bound to the pod.

        Args:
            projection: `serviceAccountToken` source of a projected volume.

        Raises:
            MissingError: the service account does not exist yet.
        """
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
            answer = await self._api.create(
                f"{self._namespace_path}/serviceaccounts/{self._account}/token", request
            )
        except ApiError as error:
            if error.status in (403, 404):
                raise MissingError(f"serviceaccount {self._account!r}: {error}") from error
            raise
        return answer["status"]["token"].encode()
