# SPDX-License-Identifier: Apache-2.0
"""Fetches from an OCI registry with a token service: artifacts, archives and modelcars."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from mizzen.fetch.errors import FetchError
from mizzen.fetch.oci import _same_owner
from model_servers import TITLE
from oci_registry import Registry

LAYER = "application/vnd.oci.image.layer.v1.tar"


@pytest.fixture
def uri(registry: Any) -> str:
    return f"oci://{registry.server.url.removeprefix('http://')}/org/tiny:v1"


@pytest.fixture
def login(registry: Any, tmp_path: Path) -> str:
    return write_login(tmp_path, registry.server.url.removeprefix("http://"))


def write_login(folder: Path, host: str) -> str:
    (folder / "config.json").write_text(Registry.login(host))
    return str(folder / "config.json")


def archive(files: dict[str, bytes], mode: str = "w", **members: tarfile.TarInfo) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for member in members.values():
            tar.addfile(member)
    return data.getvalue()


@pytest.mark.parametrize("key", [TITLE, "org.cncf.model.filepath"])
def test_an_artifact_is_fetched_completely(
    registry: Any,
    fetch: Any,
    fetched_files: Any,
    model: Any,
    expected_files: Any,
    uri: str,
    login: str,
    key: str,
) -> None:
    digest = registry.push("v1", registry.artifact(model, key))
    manifest = fetch(uri, endpoint=registry.server.url, credentials=login)
    assert fetched_files() == expected_files and manifest.revision == digest
    registry.push("v1", registry.artifact({"config.json": b"moved"}))
    assert fetch(uri, endpoint=registry.server.url, credentials=login) == manifest


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_modelcar_provides_its_models_folder(
    registry: Any,
    fetch: Any,
    fetched_files: Any,
    model: Any,
    expected_files: Any,
    uri: str,
    login: str,
    mode: str,
    tmp_path: Path,
) -> None:
    kind = LAYER if mode == "w" else f"{LAYER}+gzip"
    system = archive({"etc/passwd.json": b"{}", "models/config.json": b"older"}, mode)
    first = archive({"models/tokenizer.json": model["tokenizer.json"]}, mode)
    weights = archive({f"./models/{name}": data for name, data in model.items()}, mode)
    layers = [{"mediaType": kind, **registry.blob(data)} for data in (weights, system, weights, first)]
    image = registry.push("amd64", layers)
    other = registry.push("arm64", [])
    entries = [
        {"digest": other, "platform": {"os": "linux", "architecture": "arm64"}},
        {"digest": image, "platform": {"os": "linux", "architecture": "amd64"}},
    ]
    index = registry.tag("v1", {"schemaVersion": 2, "manifests": entries})
    manifest = fetch(uri, endpoint=registry.server.url, credentials=login)
    assert fetched_files() == expected_files and manifest.revision == index
    assert not (tmp_path / "to/archives").exists()


def test_a_pinned_digest_is_checked(registry: Any, fetch: Any, model: Any, uri: str, login: str) -> None:
    digest = registry.push("v1", registry.artifact(model))
    pinned = f"{uri.removesuffix(':v1')}@{digest}"
    assert fetch(pinned, endpoint=registry.server.url, credentials=login).revision == digest
    registry.manifests[digest] = registry.manifests[digest] + b" "
    with pytest.raises(FetchError, match="sent a manifest with the digest"):
        fetch(pinned, Path(str(login)).parent / "again", endpoint=registry.server.url, credentials=login)


def test_disconnects_during_blobs_are_retried(
    registry: Any, fetch: Any, fetched_files: Any, model: Any, expected_files: Any, uri: str, login: str
) -> None:
    registry.push("v1", registry.artifact(model))
    registry.server.faults.cut_after, registry.server.faults.cuts = 24_000, 4
    fetch(uri, endpoint=registry.server.url, credentials=login)
    assert fetched_files() == expected_files


def test_a_missing_login_is_reported(
    registry: Any, fetch: Any, model: Any, uri: str, login: str, tmp_path: Path
) -> None:
    registry.push("v1", registry.artifact(model))
    with pytest.raises(FetchError, match="credentialsSecretRef"):
        fetch(uri, endpoint=registry.server.url)
    write_login(tmp_path, "elsewhere.example")
    with pytest.raises(FetchError, match="no login for 127"):
        fetch(uri, endpoint=registry.server.url, credentials=login)


def test_a_token_service_of_another_domain_gets_no_password(
    registry: Any, servers: Any, fetch: Any, model: Any, uri: str, login: str
) -> None:
    registry.push("v1", registry.artifact(model))
    thief = Registry()
    registry.realm = thief.server.url.replace("127.0.0.1", "localhost") + "/token"
    with pytest.raises(FetchError, match="401"):
        fetch(uri, endpoint=registry.server.url, credentials=login)
    thief.close()
    assert thief.basic_seen == [""]


@pytest.mark.parametrize(
    ("home", "realm", "is_own_domain"),
    [
        ("https://registry-1.docker.io", "https://auth.docker.io/token", True),
        ("https://ghcr.io", "https://ghcr.io/token", True),
        ("https://ghcr.io", "http://ghcr.io/token", False),
        ("https://registry.example.com", "https://auth.example.org/token", False),
        ("https://registry.example.com", "https://evil-example.com/token", False),
        ("https://10.0.0.1", "https://9.0.0.1/token", False),
        ("https://ghcr.io", "https://evil.io/token", False),
    ],
)
def test_only_the_registrys_own_domain_gets_the_password(home: str, realm: str, is_own_domain: bool) -> None:
    assert _same_owner(home, realm) is is_own_domain


@pytest.mark.parametrize("name", ["models/../../evil.json", "models//etc/evil.json"])
def test_an_archive_cannot_write_outside_the_folder(
    registry: Any, fetch: Any, uri: str, login: str, name: str, tmp_path: Path
) -> None:
    registry.push("v1", [{"mediaType": LAYER, **registry.blob(archive({name: b"x"}))}])
    with pytest.raises(FetchError):
        fetch(uri, endpoint=registry.server.url, credentials=login)
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_an_archive_are_rejected(
    registry: Any, fetch: Any, uri: str, login: str, kind: bytes
) -> None:
    member = tarfile.TarInfo("models/config.json")
    member.type, member.linkname = kind, "/etc/passwd"
    registry.push("v1", [{"mediaType": LAYER, **registry.blob(archive({}, link=member))}])
    with pytest.raises(FetchError, match="only plain files"):
        fetch(uri, endpoint=registry.server.url, credentials=login)


def test_a_decompression_bomb_is_rejected(registry: Any, fetch: Any, uri: str, login: str) -> None:
    bomb = archive({"models/config.json": bytes(4_000_000)}, "w:gz")
    registry.push("v1", [{"mediaType": f"{LAYER}+gzip", **registry.blob(bomb)}])
    with pytest.raises(FetchError, match="max-bytes 1000000"):
        fetch(uri, endpoint=registry.server.url, credentials=login, max_bytes=1_000_000)


def test_a_truncated_archive_is_reported(registry: Any, fetch: Any, model: Any, uri: str, login: str) -> None:
    data = archive({"models/config.json": bytes(100_000)})[:50_000]
    registry.push("v1", [{"mediaType": LAYER, **registry.blob(data)}])
    with pytest.raises(FetchError, match="cannot be read"):
        fetch(uri, endpoint=registry.server.url, credentials=login)
