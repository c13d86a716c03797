# SPDX-License-Identifier: Apache-2.0
"""Reads images in archives of the OCI image layout, as docker buildx and buildah write them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO, Any

INDEX_TYPES = {
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
}


class OciArchive:
    """An archive that contains one image, or one index of images for several platforms."""

    def __init__(self, path: Path) -> None:
        """Open the archive at `path`.

        Raises:
            ValueError: the archive does not contain exactly one image or index.
        """
        self._tar = tarfile.open(path)  # noqa: SIM115
        [*entries] = self._read_json("index.json")["manifests"]
        if len(entries) != 1:
            raise ValueError(f"{path} contains {len(entries)} images, not one")
        self.digest: str = entries[0]["digest"]
        """Digest of the image or index: the digest that a registry has after a push."""
        self._entry = entries[0]

    def close(self) -> None:
        """Close the archive."""
        self._tar.close()

    def __enter__(self) -> OciArchive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_file(self, folder: str, suffix: str) -> tuple[str, bytes]:
        """Return name and content of the only file of the image that is in `folder` and ends with `suffix`.

        Of several platforms the first counts; the layers are searched from the last to the first.

        Raises:
            ValueError: the image has no such file.
        """
        for layer in reversed(self.manifest()["layers"]):
            with (
                self._open(_blob_path(layer["digest"])) as blob,
                tarfile.open(fileobj=blob, mode="r:*") as files,
            ):
                for member in files:
                    path = PurePosixPath(member.name.lstrip("./"))
                    if str(path.parent) == folder.strip("/") and path.name.endswith(suffix):
                        content = files.extractfile(member)
                        if content is not None:
                            return path.name, content.read()
        raise ValueError(f"the image has no file {folder}/*{suffix}")

    def manifest(self) -> dict[str, Any]:
        """Return the manifest of the image, or of the first platform of an index."""
        entry = self._entry
        while entry["mediaType"] in INDEX_TYPES:
            entries = self._read_json(_blob_path(entry["digest"]))["manifests"]
            # BuildKit lists attestations beside the images that they describe.
            entry = next(e for e in entries if "vnd.docker.reference.type" not in e.get("annotations", {}))
        return self._read_json(_blob_path(entry["digest"]))

    def size(self) -> int:
        """Return the sum of the sizes of the compressed layers, in bytes."""
        return sum(layer["size"] for layer in self.manifest()["layers"])

    def labels(self) -> dict[str, str]:
        """Return the labels in the configuration of the image."""
        config = self._read_json(_blob_path(self.manifest()["config"]["digest"]))
        return config.get("config", {}).get("Labels") or {}

    def _read_json(self, name: str) -> Any:
        with self._open(name) as file:
            return json.load(file)

    def _open(self, name: str) -> IO[bytes]:
        try:
            member = self._tar.getmember(name)
        except KeyError:
            member = self._tar.getmember(f"./{name}")
        content = self._tar.extractfile(member)
        if content is None:
            raise ValueError(f"{name} is not a file")
        return content


def _blob_path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"
