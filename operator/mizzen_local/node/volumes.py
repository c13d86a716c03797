# SPDX-License-Identifier: Apache-2.0
"""Provides the volumes of a pod as folders of this machine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mizzen_local.node.sources import MissingError, PodSources, read_field

Item = Mapping[str, Any]
TOKEN_RENEWAL_FRACTION = 0.8  # share of a token's lifetime after which it is renewed


class Volumes:
    """The volumes of one pod, as subfolders of one folder; `refresh` creates and updates them."""

    def __init__(self, folder: Path, pod: Mapping[str, Any], sources: PodSources) -> None:
        self._folder = folder
        self._volumes: list[Item] = pod["spec"].get("volumes", [])
        self._sources = sources
        self._token_renewals: dict[Path, float] = {}

    def path(self, name: str) -> Path:
        """Return the folder of a volume."""
        return self._folder / name

    async def refresh(self, pod: Mapping[str, Any]) -> None:
        """Create all volumes, and update files that come from the API.

        Args:
            pod: the pod; its status must contain its addresses.

        Raises:
            MissingError: an object does not exist, or a kind of volume is not supported.
        """
        for volume in self._volumes:
            await self._write_volume(volume, self.path(volume["name"]), pod)

    async def _write_volume(self, volume: Item, path: Path, pod: Item) -> None:
        if "hostPath" in volume:
            self._link_host_path(volume, path)
            return
        _folder(path)
        if "emptyDir" in volume:
            return
        if "projected" in volume:
            sources = volume["projected"].get("sources", [])
        elif kind := next((kind for kind in ("secret", "configMap", "downwardAPI") if kind in volume), None):
            sources = [{kind: volume[kind]}]
        else:
            kinds = ", ".join(key for key in volume if key != "name")
            raise MissingError(
                f"volume {volume['name']!r}: {kinds} is not available on mizzen-local; it supports hostPath, "
                "emptyDir, projected, secret, configMap and downwardAPI"
            )
        files: dict[str, bytes] = {}
        for source in sources:
            for kind, projection in source.items():
                files |= await self._read_files(kind, projection, path, pod)
        _write_files(path, files)

    def _link_host_path(self, volume: Item, path: Path) -> None:
        target, kind = Path(volume["hostPath"]["path"]), volume["hostPath"].get("type", "")
        if kind == "DirectoryOrCreate":
            target.mkdir(parents=True, exist_ok=True)
        elif kind == "FileOrCreate":
            target.touch(exist_ok=True)
        if not target.exists():
            raise MissingError(f"volume {volume['name']!r}: hostPath {target} does not exist on this machine")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_symlink():
            path.symlink_to(target)

    async def _read_files(self, kind: str, projection: Item, path: Path, pod: Item) -> dict[str, bytes]:
        if kind in ("secret", "configMap"):
            data = await self._sources.read_data(kind, projection)
            if not (items := projection.get("items")):
                return data
            absent = [item["key"] for item in items if item["key"] not in data]
            if absent and not projection.get("optional"):
                raise MissingError(f"{kind} volume refers to keys that do not exist: {', '.join(absent)}")
            return {item["path"]: data[item["key"]] for item in items if item["key"] in data}
        if kind == "downwardAPI":
            return {
                item["path"]: read_field(pod, item["fieldRef"]["fieldPath"]).encode()
                for item in projection.get("items", ())
                if "fieldRef" in item
            }
        if kind == "serviceAccountToken":
            return {projection["path"]: await self._read_token(projection, path / projection["path"])}
        raise MissingError(f"projected source {kind} is not available on mizzen-local")

    async def _read_token(self, projection: Item, file: Path) -> bytes:
        if time.monotonic() < self._token_renewals.get(file, 0.0) and (current := _read(file)) is not None:
            return current
        token = await self._sources.request_token(projection)
        self._token_renewals[file] = time.monotonic() + TOKEN_RENEWAL_FRACTION * projection.get(
            "expirationSeconds", 3600
        )
        return token


def _folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder and delete its other files; a file that differs is replaced atomically."""
    for name, data in files.items():
        path = folder / name
        if _read(path) == data:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        temporary.touch(mode=0o600)
        temporary.write_bytes(data)
        temporary.replace(path)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if str(path.relative_to(folder)) not in files:
            path.unlink()


def remove_folder(folder: Path) -> None:
    """Remove a folder with its content; links in it are removed, but not their targets."""
    shutil.rmtree(folder, ignore_errors=True)
