# SPDX-License-Identifier: Apache-2.0
"""Plan fetches of artifacts and images in a registry (`oci://`), through the OCI distribution API 1.1.

Each layer of a manifest has one of three layouts. It is a single file, named by the annotation
`org.opencontainers.image.title` (ORAS) or `org.cncf.model.filepath` (the CNCF's model format). Or it is an
archive of files. Or it is the layer of an image whose folder `/models` has the files (KServe's modelcar).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx

from mizzen.fetch.client import Credentials, FetchClient, RequestRejected, StaticCredentials, origin
from mizzen.fetch.errors import FetchError
from mizzen.fetch.plan import FetchPlan, FileFilter, RemoteFile, make_plan
from mizzen.fetch.source import OciSource

TITLE, FILEPATH = "org.opencontainers.image.title", "org.cncf.model.filepath"
UNPACK = "io.deis.oras.content.unpack"
MODELCAR_FOLDER = "models"
_INDEX = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFEST = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_TAR = re.compile(r"[.+](tar|gzip)([.+]|$)")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
BLOBS = "archives"
"""Subfolder of the model folder that keeps archives until they are unpacked."""
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


class RegistryLogin(StaticCredentials):
    """Basic credentials, which are exchanged for a bearer token if the registry requires one."""

    def __init__(self, home: str, user: str, password: str) -> None:
        """Use a login for the registry at the URL `home`; an empty `user` means anonymous access."""
        self._home = home
        basic = base64.b64encode(f"{user}:{password}".encode()).decode() if user else ""
        self._basic = f"Basic {basic}" if basic else ""
        super().__init__(self._basic)
        self.client: FetchClient | None = None

    def handle_unauthorized(self, url: str, response: httpx.Response) -> bool:
        """Request a token from the token service that the registry names; return whether it sent a token."""
        kind, _, rest = response.headers.get("www-authenticate", "").partition(" ")
        parameters = dict(_PARAMETER.findall(rest))
        realm = parameters.get("realm", "")
        if kind.lower() != "bearer" or not realm or self.client is None:
            return False
        basic = self._basic if _same_owner(self._home, realm) else ""
        query = urlencode({key: parameters[key] for key in ("service", "scope") if key in parameters})
        credentials = StaticCredentials(basic)
        answer = self.client.get(f"{realm}{'&' if urlsplit(realm).query else '?'}{query}", credentials)
        try:
            body = json.loads(answer.content)
            self.authorization = f"Bearer {body.get('token') or body['access_token']}"
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        return True


def _same_owner(home: str, realm: str) -> bool:
    """Return whether the token service at `realm` may receive the password of the registry at `home`.

    The token service must have the registry's host name or a host name in the same domain, and must use
    https if the registry does.
    """
    (scheme, host, _), (realm_scheme, realm_host, _) = origin(home), origin(realm)
    if scheme == "https" and realm_scheme != "https":
        return False
    if host == realm_host:
        return True
    domain = ".".join(host.split(".")[-2:])
    named = not host.replace(".", "").isdecimal() and "." in domain and len(host.split(".")) > 2
    return named and (realm_host == domain or realm_host.endswith(f".{domain}"))


def registry_url(source: OciSource, endpoint: str = "") -> str:
    """Return `endpoint` if it is not empty, or else the base URL of the source's registry."""
    if endpoint:
        return endpoint.rstrip("/")
    return (
        "https://registry-1.docker.io"
        if source.host in ("docker.io", "index.docker.io")
        else f"https://{source.host}"
    )


def parse_credentials(text: str, source: OciSource, endpoint: str = "") -> RegistryLogin:
    """Return the login for the source's registry from the text of a Docker `config.json`.

    An empty text means anonymous access.

    Raises:
        FetchError: the text is not a Docker `config.json`, or has no login for the registry.
    """
    home = registry_url(source, endpoint)
    if not text.strip():
        return RegistryLogin(home, "", "")
    try:
        logins = json.loads(text)["auths"]
        login = next(
            (logins[key] for key in logins if _registry_host(key) == _registry_host(source.host)), None
        )
        if login is None:
            hosts = ", ".join(sorted(logins)) or "none"
            raise FetchError(f"--credentials has no login for {source.host}, only for {hosts}")
        user, password = login.get("username", ""), login.get("password", "")
        if not user:
            user, _, password = base64.b64decode(login["auth"], validate=True).decode().partition(":")
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error):
        raise FetchError(
            '--credentials must contain a Docker config.json, {"auths": {"registry": {"auth": …}}}, as '
            "Secrets of type kubernetes.io/dockerconfigjson do"
        ) from None
    return RegistryLogin(home, user, password)


def _registry_host(name: str) -> str:
    host = name.partition("://")[2] or name
    host = host.partition("/")[0].lower()
    return "docker.io" if host in ("index.docker.io", "registry-1.docker.io") else host


def plan_fetch(
    client: FetchClient,
    source: OciSource,
    credentials: RegistryLogin,
    file_filter: FileFilter,
    *,
    endpoint: str = "",
    pin: str = "",
    limit: int = 0,
) -> FetchPlan:
    """Resolve the source's reference to a manifest, and return a plan with the manifest's files.

    The revision of the plan is the digest of the manifest or image index to which the reference resolves.

    Args:
        client: client for the requests.
        source: registry, repository and reference.
        credentials: login for the registry.
        file_filter: selects the files.
        endpoint: base URL of the registry; empty for the source's own registry.
        pin: digest to use instead of the source's reference; empty to resolve the reference.
        limit: maximum total size in bytes; 0 means no limit.

    Raises:
        FetchError: the registry denies access, the manifest is invalid, or `make_plan` rejects the files.
    """
    credentials.client = client
    name = f"oci://{source.host}/{source.repository}"
    base = f"{registry_url(source, endpoint)}/v2/{_repository_path(source)}"
    reference = pin or source.reference
    try:
        body, digest = _get_manifest(client, base, credentials, reference)
        if "manifests" in body:
            inner = _select_manifest(body["manifests"])
            body, _ = _get_manifest(client, base, credentials, inner)
        last = {layer["digest"]: number for number, layer in enumerate(body["layers"])}
        layers = [body["layers"][number] for number in sorted(last.values())]  # an image may repeat a layer
        remotes = [_layer_file(layer, number, base, file_filter) for number, layer in enumerate(layers)]
        files = [remote for remote in remotes if remote is not None]
    except RequestRejected as error:
        raise FetchError(_explain(error, f"{name} ({reference})")) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FetchError(f"{name} has an invalid manifest: {type(error).__name__}: {error}") from error
    return make_plan(digest, files, source=name, limit=limit)


def _repository_path(source: OciSource) -> str:
    official = source.host in ("docker.io", "index.docker.io") and "/" not in source.repository
    return f"library/{source.repository}" if official else source.repository


def _get_manifest(
    client: FetchClient, base: str, credentials: Credentials, reference: str
) -> tuple[dict[str, Any], str]:
    accepted = ", ".join((*_INDEX, *_MANIFEST))
    data = client.get(f"{base}/manifests/{reference}", credentials, {"Accept": accepted}).content
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if _DIGEST.fullmatch(reference) and digest != reference:
        raise FetchError(f"the registry sent a manifest with the digest {digest} for {reference}")
    return json.loads(data), digest


def _select_manifest(manifests: Sequence[Mapping[str, Any]]) -> str:
    """Return the digest of the manifest for Linux on x86-64; if it is missing, that of the first manifest.

    Attestations, which have the platform unknown/unknown, are the last choice.
    """

    def rank(manifest: Mapping[str, Any]) -> int:
        entry = manifest.get("platform", {})
        platform = (entry.get("os", ""), entry.get("architecture", ""))
        return 0 if platform == ("linux", "amd64") else 2 if platform == ("unknown", "unknown") else 1

    return str(min(manifests, key=rank)["digest"])


def _layer_file(
    layer: Mapping[str, Any], number: int, base: str, file_filter: FileFilter
) -> RemoteFile | None:
    """Return the file or archive of layer `number`, or None if `file_filter` does not select it.

    Paths of archives sort in the order of the layers, because later layers overwrite files of earlier layers.
    """
    kind, digest, size = layer["mediaType"], layer["digest"], layer["size"]
    annotations = layer.get("annotations") or {}
    title = annotations.get(FILEPATH) or annotations.get(TITLE) or ""
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"digest {digest!r} of a layer is not a sha256")
    url = f"{base}/blobs/{digest}"
    blob = f"{BLOBS}/{number:04}-{digest.replace(':', '-')}"
    archive = bool(_TAR.search(kind)) and (not title or UNPACK in annotations or ".cncf.model." in kind)
    if archive:
        if "zstd" in kind:
            raise FetchError(f"a layer is compressed as {kind}: use gzip or no compression")
        inside = "" if title or ".cncf.model." in kind else MODELCAR_FOLDER
        return RemoteFile(blob, size, digest, url, unpack=inside)
    if title and file_filter.matches(title):
        return RemoteFile(title, size, digest, url)
    return None


def _explain(error: RequestRejected, name: str) -> str:
    if error.code in (401, 403):
        return (
            f"{name}: access denied ({error.code}): provide a login that may pull it "
            "(spec.model.credentialsSecretRef, a Secret of type kubernetes.io/dockerconfigjson)"
        )
    if error.code == 404:
        return f"{name}: the registry has no such repository, tag or digest"
    return str(error)
