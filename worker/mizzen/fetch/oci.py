"""Plan fetches from `oci://`: artifacts and images in a registry, through the OCI distribution API 1.1.

A manifest may combine three layouts: one file per layer, named by the annotation
`org.opencontainers.image.title` (ORAS) or `org.cncf.model.filepath` (the CNCF's model format); layers that
are archives of files; and an image whose layers contain `/models` (KServe's modelcar).
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
"""Subfolder that keeps archives until they are unpacked."""
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


class RegistryLogin(StaticCredentials):
    """Basic credentials, exchanged for a bearer token at the registry's token service if it asks for one."""

    def __init__(self, home: str, user: str, password: str) -> None:
        """Log in to the registry at the URL `home`; anonymously if `user` is empty."""
        self._home = home
        basic = base64.b64encode(f"{user}:{password}".encode()).decode() if user else ""
        self._basic = f"Basic {basic}" if basic else ""
        super().__init__(self._basic)
        self.client: FetchClient | None = None

    def handle_unauthorized(self, url: str, response: httpx.Response) -> bool:
        """Get a token from the service that the registry names; return whether it gave one."""
        kind, _, rest = response.headers.get("www-authenticate", "").partition(" ")
        given = dict(_PARAMETER.findall(rest))
        realm = given.get("realm", "")
        if kind.lower() != "bearer" or not realm or self.client is None:
            return False
        basic = self._basic if _same_owner(self._home, realm) else ""
        query = urlencode({key: given[key] for key in ("service", "scope") if key in given})
        credentials = StaticCredentials(basic)
        answer = self.client.get(f"{realm}{'&' if urlsplit(realm).query else '?'}{query}", credentials)
        try:
            body = json.loads(answer.content)
            self.authorization = f"Bearer {body.get('token') or body['access_token']}"
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        return True


def _same_owner(home: str, realm: str) -> bool:
    """Return whether a token service may receive the password: it has the registry's host or domain."""
    (scheme, host, _), (realm_scheme, realm_host, _) = origin(home), origin(realm)
    if scheme == "https" and realm_scheme != "https":
        return False
    if host == realm_host:
        return True
    domain = ".".join(host.split(".")[-2:])
    named = not host.replace(".", "").isdecimal() and "." in domain and len(host.split(".")) > 2
    return named and (realm_host == domain or realm_host.endswith(f".{domain}"))


def registry_url(source: OciSource, endpoint: str = "") -> str:
    """Return the base URL of a source's registry; `endpoint` overrides it."""
    if endpoint:
        return endpoint.rstrip("/")
    return (
        "https://registry-1.docker.io"
        if source.host in ("docker.io", "index.docker.io")
        else f"https://{source.host}"
    )


def parse_credentials(text: str, source: OciSource, endpoint: str = "") -> RegistryLogin:
    """Return the login for the source's registry from a Docker `config.json`; an empty text is anonymous.

    Raises:
        FetchError: the text is not a Docker config, or has no login for the registry.
    """
    home = registry_url(source, endpoint)
    if not text.strip():
        return RegistryLogin(home, "", "")
    try:
        every = json.loads(text)["auths"]
        found = next(
            (every[key] for key in every if _registry_host(key) == _registry_host(source.host)), None
        )
        if found is None:
            raise FetchError(
                f"--credentials has no login for {source.host}, only for {', '.join(sorted(every)) or 'none'}"
            )
        user, password = found.get("username", ""), found.get("password", "")
        if not user:
            user, _, password = base64.b64decode(found["auth"], validate=True).decode().partition(":")
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error):
        raise FetchError(
            '--credentials must contain a Docker config.json, {"auths": {"registry": {"auth": …}}}, as in '
            "Secrets of type kubernetes.io/dockerconfigjson"
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
    """Resolve the reference to a manifest and list its files; the revision is the manifest's digest.

    Raises:
        FetchError: the registry denies access, or the manifest contains no model.
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
        layers = [body["layers"][number] for number in sorted(last.values())]  # an image may repeat one
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
    """Return the digest of the manifest for Linux on x86-64, or else the first that is not an attestation."""

    def rank(one: Mapping[str, Any]) -> int:
        platform = one.get("platform", {})
        found = (platform.get("os", ""), platform.get("architecture", ""))
        return 0 if found == ("linux", "amd64") else 2 if found == ("unknown", "unknown") else 1

    return str(min(manifests, key=rank)["digest"])


def _layer_file(
    layer: Mapping[str, Any], number: int, base: str, file_filter: FileFilter
) -> RemoteFile | None:
    """Return the file or archive of a layer; None if it is not selected.

    Names of archives sort in the order of the layers, because later layers overwrite earlier ones.
    """
    kind, digest, size = layer["mediaType"], layer["digest"], layer["size"]
    notes = layer.get("annotations") or {}
    title = notes.get(FILEPATH) or notes.get(TITLE) or ""
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"digest {digest!r} of a layer is not a sha256")
    url = f"{base}/blobs/{digest}"
    blob = f"{BLOBS}/{number:04}-{digest.replace(':', '-')}"
    archive = bool(_TAR.search(kind)) and (not title or UNPACK in notes or ".cncf.model." in kind)
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
            f"{name}: access denied ({error.code}): provide a login that can pull it "
            "(spec.model.credentialsSecretRef, a Secret of type kubernetes.io/dockerconfigjson)"
        )
    if error.code == 404:
        return f"{name}: the registry has no such repository, tag or digest"
    return str(error)
