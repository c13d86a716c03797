"""oci://: artifacts and images of a registry, by its HTTP API (OCI distribution 1.1).

Three ways to keep a model in a registry are known, and may be mixed in one manifest: a layer a file, named by
the annotation `org.opencontainers.image.title` (ORAS) or `org.cncf.model.filepath` (the CNCF's model format);
a layer an archive of files; and an image whose layers hold `/models` (KServe's modelcar).
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

from mizzen.fetch.client import Client, Credentials, Refusal, Shown, origin
from mizzen.fetch.errors import FetchError
from mizzen.fetch.plan import Choice, Plan, Remote, made
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
"""Folder of archives until they are unpacked."""
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


class RegistryLogin(Shown):
    """Basic credentials, and the bearer tokens that a registry's own service gives for them."""

    def __init__(self, home: str, user: str, password: str) -> None:
        """Log in at the registry of the URL `home`; without a user as anybody."""
        self._home = home
        basic = base64.b64encode(f"{user}:{password}".encode()).decode() if user else ""
        self._basic = f"Basic {basic}" if basic else ""
        super().__init__(self._basic)
        self.client: Client | None = None

    def refused(self, url: str, response: httpx.Response) -> bool:
        """Get a token where the registry says that one is given."""
        kind, _, rest = response.headers.get("www-authenticate", "").partition(" ")
        given = dict(_PARAMETER.findall(rest))
        realm = given.get("realm", "")
        if kind.lower() != "bearer" or not realm or self.client is None:
            return False
        basic = self._basic if _same_owner(self._home, realm) else ""
        query = urlencode({key: given[key] for key in ("service", "scope") if key in given})
        shows = Shown(basic)
        answer = self.client.get(f"{realm}{'&' if urlsplit(realm).query else '?'}{query}", shows)
        try:
            body = json.loads(answer.content)
            self.authorization = f"Bearer {body.get('token') or body['access_token']}"
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        return True


def _same_owner(home: str, realm: str) -> bool:
    """Whether a token service may get a password: it is the registry's host, or of its domain."""
    (scheme, host, _), (realm_scheme, realm_host, _) = origin(home), origin(realm)
    if scheme == "https" and realm_scheme != "https":
        return False
    if host == realm_host:
        return True
    domain = ".".join(host.split(".")[-2:])
    named = not host.replace(".", "").isdecimal() and "." in domain and len(host.split(".")) > 2
    return named and (realm_host == domain or realm_host.endswith(f".{domain}"))


def registry(source: OciSource, endpoint: str = "") -> str:
    """Base URL of a source's registry."""
    if endpoint:
        return endpoint.rstrip("/")
    return (
        "https://registry-1.docker.io"
        if source.host in ("docker.io", "index.docker.io")
        else f"https://{source.host}"
    )


def credentials(text: str, source: OciSource, endpoint: str = "") -> RegistryLogin:
    """The login of a registry in a `config.json` of Docker.

    Raises:
        FetchError: it is none, or has no login for the registry.
    """
    home = registry(source, endpoint)
    if not text.strip():
        return RegistryLogin(home, "", "")
    try:
        every = json.loads(text)["auths"]
        found = next((every[key] for key in every if _hosts(key) == _hosts(source.host)), None)
        if found is None:
            raise FetchError(
                f"--credentials has no login for {source.host}, but for {', '.join(sorted(every)) or 'none'}"
            )
        user, password = found.get("username", ""), found.get("password", "")
        if not user:
            user, _, password = base64.b64decode(found["auth"], validate=True).decode().partition(":")
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error):
        raise FetchError(
            '--credentials must hold a config.json of Docker, {"auths": {"registry": {"auth": …}}}, as '
            "Secrets of type kubernetes.io/dockerconfigjson do"
        ) from None
    return RegistryLogin(home, user, password)


def _hosts(name: str) -> str:
    host = name.partition("://")[2] or name
    host = host.partition("/")[0].lower()
    return "docker.io" if host in ("index.docker.io", "registry-1.docker.io") else host


def plan(
    client: Client,
    source: OciSource,
    shows: RegistryLogin,
    choice: Choice,
    *,
    endpoint: str = "",
    pin: str = "",
    limit: int = 0,
) -> Plan:
    """Resolve a tag to its manifest, and list what the manifest holds; the revision is its digest.

    Raises:
        FetchError: the registry refuses, or the manifest holds no model.
    """
    shows.client = client
    name = f"oci://{source.host}/{source.repository}"
    base = f"{registry(source, endpoint)}/v2/{_repository(source)}"
    reference = pin or source.reference
    try:
        body, digest = _manifest(client, base, shows, reference)
        if "manifests" in body:
            inner = _chosen(body["manifests"])
            body, _ = _manifest(client, base, shows, inner)
        last = {layer["digest"]: number for number, layer in enumerate(body["layers"])}
        layers = [body["layers"][number] for number in sorted(last.values())]  # an image may repeat one
        remotes = [_remote(layer, number, base, choice) for number, layer in enumerate(layers)]
        files = [remote for remote in remotes if remote is not None]
    except Refusal as error:
        raise FetchError(_words(error, f"{name} ({reference})")) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FetchError(
            f"{name} has a manifest that makes no sense: {type(error).__name__}: {error}"
        ) from error
    return made(digest, files, source=name, limit=limit)


def _repository(source: OciSource) -> str:
    official = source.host in ("docker.io", "index.docker.io") and "/" not in source.repository
    return f"library/{source.repository}" if official else source.repository


def _manifest(client: Client, base: str, shows: Credentials, reference: str) -> tuple[dict[str, Any], str]:
    accepted = ", ".join((*_INDEX, *_MANIFEST))
    data = client.get(f"{base}/manifests/{reference}", shows, {"Accept": accepted}).content
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if _DIGEST.fullmatch(reference) and digest != reference:
        raise FetchError(f"the registry sends a manifest with digest {digest} for {reference}")
    return json.loads(data), digest


def _chosen(manifests: Sequence[Mapping[str, Any]]) -> str:
    """The manifest of an index: that of Linux on x86-64, or else the first that is no attestation."""

    def rank(one: Mapping[str, Any]) -> int:
        platform = one.get("platform", {})
        found = (platform.get("os", ""), platform.get("architecture", ""))
        return 0 if found == ("linux", "amd64") else 2 if found == ("unknown", "unknown") else 1

    return str(min(manifests, key=rank)["digest"])


def _remote(layer: Mapping[str, Any], number: int, base: str, choice: Choice) -> Remote | None:
    """What a layer gives; archives have names in the order of the layers, for later ones win."""
    kind, digest, size = layer["mediaType"], layer["digest"], layer["size"]
    notes = layer.get("annotations") or {}
    title = notes.get(FILEPATH) or notes.get(TITLE) or ""
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"digest {digest!r} of a layer is no sha256")
    url = f"{base}/blobs/{digest}"
    blob = f"{BLOBS}/{number:04}-{digest.replace(':', '-')}"
    archive = bool(_TAR.search(kind)) and (not title or UNPACK in notes or ".cncf.model." in kind)
    if archive:
        if "zstd" in kind:
            raise FetchError(f"a layer is packed as {kind}: pack it with gzip, or not at all")
        inside = "" if title or ".cncf.model." in kind else MODELCAR_FOLDER
        return Remote(blob, size, digest, url, unpack=inside)
    if title and choice.takes(title):
        return Remote(title, size, digest, url)
    return None


def _words(error: Refusal, name: str) -> str:
    if error.code in (401, 403):
        return (
            f"{name} is refused ({error.code}): give a login that may pull it "
            "(spec.model.credentialsSecretRef, a Secret of type kubernetes.io/dockerconfigjson)"
        )
    if error.code == 404:
        return f"{name}: the registry has no such repository, tag or digest"
    return str(error)
