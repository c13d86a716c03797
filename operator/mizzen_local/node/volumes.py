"""Volumes of a pod as folders of this machine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mizzen_local.node.sources import MissingError, Sources, field

Item = Mapping[str, Any]
TOKEN_SHARE = 0.8  # of a token's life, after which a new one is asked for


class Volumes:
    """The volumes of one pod below one folder; `refresh` brings their files up to date."""

    def __init__(self, folder: Path, pod: Mapping[str, Any], sources: Sources) -> None:
        self._folder = folder
        self._volumes: list[Item] = pod["spec"].get("volumes", [])
        self._sources = sources
        self._tokens: dict[Path, float] = {}

    def path(self, name: str) -> Path:
        """Folder of a volume."""
        return self._folder / name

    async def refresh(self, pod: Mapping[str, Any]) -> None:
        """Make every volume, and write the files that the API gives.

        Raises:
            MissingError: an object is not there, or a kind of volume is not known here.
        """
        for volume in self._volumes:
            await self._make(volume, self.path(volume["name"]), pod)

    async def _make(self, volume: Item, path: Path, pod: Item) -> None:
        if "hostPath" in volume:
            self._host_path(volume, path)
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
                f"volume {volume['name']!r}: {kinds} is not available on mizzen-local; it knows hostPath, "
                "emptyDir, projected, secret, configMap and downwardAPI"
            )
        wanted: dict[str, bytes] = {}
        for source in sources:
            for kind, projection in source.items():
                wanted |= await self._files(kind, projection, path, pod)
        _write(path, wanted)

    def _host_path(self, volume: Item, path: Path) -> None:
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

    async def _files(self, kind: str, projection: Item, path: Path, pod: Item) -> dict[str, bytes]:
        if kind in ("secret", "configMap"):
            data = await self._sources.data(kind, projection)
            if not (items := projection.get("items")):
                return data
            absent = [item["key"] for item in items if item["key"] not in data]
            if absent and not projection.get("optional"):
                raise MissingError(f"{kind} volume refers to keys that are not there: {', '.join(absent)}")
            return {item["path"]: data[item["key"]] for item in items if item["key"] in data}
        if kind == "downwardAPI":
            return {
                item["path"]: field(pod, item["fieldRef"]["fieldPath"]).encode()
                for item in projection.get("items", ())
                if "fieldRef" in item
            }
        if kind == "serviceAccountToken":
            return {projection["path"]: await self._token(projection, path / projection["path"])}
        raise MissingError(f"projected source {kind} is not available on mizzen-local")

    async def _token(self, projection: Item, file: Path) -> bytes:
        if time.monotonic() < self._tokens.get(file, 0.0) and (known := _read(file)) is not None:
            return known
        token = await self._sources.token(projection)
        self._tokens[file] = time.monotonic() + TOKEN_SHARE * projection.get("expirationSeconds", 3600)
        return token


def _folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _write(folder: Path, wanted: Mapping[str, bytes]) -> None:
    """Make a folder hold these files alone; each is replaced in one step, and only when it differs."""
    for name, data in wanted.items():
        path = folder / name
        if _read(path) == data:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        temporary.touch(mode=0o600)
        temporary.write_bytes(data)
        temporary.replace(path)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if str(path.relative_to(folder)) not in wanted:
            path.unlink()


def remove(folder: Path) -> None:
    """Remove a pod's folder; what a link points at stays."""
    shutil.rmtree(folder, ignore_errors=True)
