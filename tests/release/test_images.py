# SPDX-License-Identifier: Apache-2.0
"""Images of a release are read from OCI archives, described and given a provenance."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import build_images  # pyright: ignore[reportMissingImports]
import pytest
from oci_archive import OciArchive  # pyright: ignore[reportMissingImports]
from provenance import make_statement  # pyright: ignore[reportMissingImports]

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
SBOM = b'{"bomFormat": "CycloneDX"}'


class Layout:
    """Content of an OCI archive that a test writes."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    def add(self, content: bytes | dict[str, Any], kind: str = "x", **fields: Any) -> dict[str, Any]:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data), **fields}

    def image(self, *layers: bytes) -> dict[str, Any]:
        config = self.add({"config": {"Labels": {"org.opencontainers.image.version": "9"}}})
        return self.add({"config": config, "layers": [self.add(layer) for layer in layers]}, MANIFEST)

    def write(self, path: Path, *entries: dict[str, Any], prefix: str = "") -> Path:
        with tarfile.open(path, "w") as archive:
            add_file(archive, f"{prefix}index.json", json.dumps({"manifests": entries}).encode())
            for digest, data in self.blobs.items():
                add_file(archive, f"{prefix}blobs/sha256/{digest}", data)
        return path


def add_file(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def layer(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            add_file(archive, name, data)
    return gzip.compress(buffer.getvalue())


FIRST = layer(**{"opt/mizzen/share/sbom/deep/other.cdx.json": b"{}", "opt/mizzen/bin/mizzen": b"#!"})
LAST = layer(**{"opt/mizzen/share/sbom/mizzen-gateway.cdx.json": SBOM})


@pytest.mark.parametrize("prefix", ["", "./"])
def test_an_archive_of_one_image_is_read(tmp_path: Path, prefix: str) -> None:
    layout = Layout()
    image = layout.image(LAST, FIRST)
    with OciArchive(layout.write(tmp_path / "image.tar", image, prefix=prefix)) as archive:
        assert archive.digest == image["digest"]
        assert archive.size() == len(FIRST) + len(LAST)
        assert archive.labels() == {"org.opencontainers.image.version": "9"}
        found = archive.read_file("opt/mizzen/share/sbom", ".cdx.json")
        assert found == ("mizzen-gateway.cdx.json", SBOM)
        with pytest.raises(ValueError, match=r"no file opt/mizzen/share/sbom/\*\.spdx"):
            archive.read_file("opt/mizzen/share/sbom", ".spdx")


def test_an_index_with_attestations_is_read(tmp_path: Path) -> None:
    """BuildKit writes an index, which refers to the image and to its attestations."""
    layout = Layout()
    attestation = layout.image(b"")
    attestation["annotations"] = {"vnd.docker.reference.type": "attestation-manifest"}
    index = layout.add({"manifests": [attestation, layout.image(FIRST, LAST)]}, INDEX)
    with OciArchive(layout.write(tmp_path / "image.tar", index)) as archive:
        assert archive.digest == index["digest"]
        assert archive.read_file("opt/mizzen/share/sbom", ".cdx.json")[1] == SBOM


def test_an_archive_of_two_images_is_refused(tmp_path: Path) -> None:
    layout = Layout()
    path = layout.write(tmp_path / "image.tar", layout.image(FIRST), layout.image(LAST))
    with pytest.raises(ValueError, match="contains 2 images"):
        OciArchive(path)


@pytest.mark.parametrize(
    ("changed", "options", "pushed"),
    [
        ("", ["--push"], True),
        ("new.py", [], False),
        ("new.py", ["--push", "--allow-local-changes"], True),
        ("old.py", ["--push", "--allow-local-changes"], True),
    ],
)
def test_images_of_a_commit_are_pushed(
    clone: Path, monkeypatch: pytest.MonkeyPatch, changed: str, options: list[str], pushed: bool
) -> None:
    if changed:
        (clone / changed).write_text("changed")
    reference = "r.example.com/mizzen/gateway@sha256:7"  # without a tag
    assert build(monkeypatch, options) == ["build", *([f"push {reference}"] if pushed else [])]


@pytest.mark.parametrize("changed", ["new.py", "old.py"])
def test_local_changes_are_not_pushed(clone: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    """Labels and provenance would name a commit without them."""
    (clone / changed).write_text("changed")
    with pytest.raises(ValueError, match=rf"without local changes; commit or remove:\n.*{changed}"):
        build(monkeypatch, ["--push"])
    assert not (clone.parent / "out").exists()


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, in place of this one."""
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "old.py").write_text("")
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "Begin"]):
        subprocess.run(["git", *command], cwd=clone, check=True)
    monkeypatch.setattr(build_images, "ROOT", clone)
    return clone


def build(monkeypatch: pytest.MonkeyPatch, options: list[str]) -> list[str]:
    """Run build_images.py without a builder; return what it did with the image."""
    done: list[str] = []
    out = build_images.ROOT.parent / "out"
    command = ["build_images.py", "--registry", "r.example.com", "--target", "gateway", "--out", str(out)]
    monkeypatch.setattr("sys.argv", [*command, *options])
    monkeypatch.setattr(build_images, "read_version", lambda: "9.8.7")
    monkeypatch.setattr(build_images, "build_archive", lambda *_: done.append("build"))
    record = {"reference": "r.example.com/mizzen/gateway:9.8.7", "digest": "sha256:7"}
    monkeypatch.setattr(build_images, "write_records", lambda *_: record)
    monkeypatch.setattr(build_images, "push_archive", lambda _, name, **__: done.append(f"push {name}"))
    build_images.main()
    return done


def test_the_provenance_names_image_source_and_arguments() -> None:
    statement = make_statement(
        ("r.example.com/t/mizzen/gateway", "sha256:" + "a" * 64),
        parameters={"builder": "buildah", "target": "gateway", "BASE": "b@sha256:1"},
        source=("https://forge.example.com/o/r", "c" * 40),
        times=("2030-01-01T00:00:00Z", "2030-01-01T00:01:00Z"),
    )
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert statement["subject"] == [
        {"name": "r.example.com/t/mizzen/gateway", "digest": {"sha256": "a" * 64}}
    ]
    definition = statement["predicate"]["buildDefinition"]
    assert definition["externalParameters"]["BASE"] == "b@sha256:1"
    assert definition["resolvedDependencies"][0]["digest"] == {"gitCommit": "c" * 40}
    assert set(statement["predicate"]["runDetails"]) == {"builder", "metadata"}
