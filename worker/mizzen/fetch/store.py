"""The folder of a model: what is in it, who fetches into it, and when it is whole.

`.mizzen.json`, written last, says what the whole folder holds. Until then `.mizzen.plan.json` says what is
being fetched, so that a fetch that was killed goes on with the same revision, and `NAME.partial` beside
`NAME.partial.done` hold a file's parts. Only who holds the lock `.mizzen.lock` writes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mizzen.fetch.errors import FetchError
from mizzen.fetch.plan import Plan, Remote, safe

logger = logging.getLogger(__name__)

MANIFEST, PLAN, LOCK = ".mizzen.json", ".mizzen.plan.json", ".mizzen.lock"
FORMAT = 1
_LOCK_POLL_SECONDS = 0.5
SPARE_BYTES = 16 * 1024 * 1024
"""What a volume should have beyond the model, for its own administration."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a whole folder; `digest` is its `sha256:…`."""

    path: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a whole folder holds."""

    source: str
    endpoint: str
    revision: str
    files: tuple[Entry, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)


class Store:
    """One model's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> None:
        """Make the folder where it is missing.

        Raises:
            FetchError: it cannot be made or written to.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise failed(error, self.folder) from error

    @contextmanager
    def lock(self, seconds: float, check: Callable[[], None], waits: Callable[[], None]) -> Iterator[None]:
        """Hold the folder alone; a process that ends in any way lets it go.

        Args:
            seconds: how long to wait for another one.
            check: called while waiting; may raise.
            waits: called once when another one holds it.

        Raises:
            FetchError: another one holds it for too long.
        """
        deadline, told = time.monotonic() + seconds, False
        try:
            descriptor = os.open(
                self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            raise failed(error, self.folder / LOCK) from error
        try:
            while not _locked(descriptor):
                if not told:
                    waits()
                    told = True
                if time.monotonic() >= deadline:
                    raise FetchError(
                        f"another fetch holds {self.folder / LOCK} for over {seconds:g} s: look for its pod"
                    )
                check()
                time.sleep(_LOCK_POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)

    def whole(self, source: str, endpoint: str) -> Manifest | None:
        """What the folder holds if it is whole and of this source; None when it is to be fetched.

        Raises:
            FetchError: it holds another model.
        """
        found = self._read(MANIFEST)
        if found is None:
            return None
        try:
            manifest = Manifest(
                found["source"],
                found["endpoint"],
                found["revision"],
                tuple(Entry(safe(one["path"]), one["size"], one["digest"]) for one in found["files"]),
            )
        except (KeyError, TypeError, AttributeError):
            return None
        if (manifest.source, manifest.endpoint) != (source, endpoint):
            raise FetchError(
                f"{self.folder} holds {manifest.source!r}, not {source!r}: "
                "choose another folder, or empty this one"
            )
        complete = all(_size(self.folder / entry.path) == entry.size for entry in manifest.files)
        return manifest if complete else None

    def pinned(self, source: str) -> str:
        """The revision of a fetch of this source that is not done; empty when there is none."""
        plan = self._read(PLAN)
        return str(plan.get("revision", "")) if plan and plan.get("source") == source else ""

    def begin(self, source: str, plan: Plan) -> None:
        """Note a plan, and remove what an earlier one has left that this one has not."""
        before = self._read(PLAN) or {}
        now = {file.path: (file.size, file.digest, file.version) for file in plan.files}
        for old in before.get("files", []):
            try:
                path = safe(old["path"])
                kept = now.get(path) == (old["size"], old["digest"], old["version"])
            except (KeyError, TypeError, AttributeError, FetchError):
                continue
            for name in () if kept else (path, f"{path}.partial", f"{path}.partial.done"):
                self.place(name).unlink(missing_ok=True)
        body = {"format": FORMAT, "source": source, "revision": plan.revision}
        files = [_noted(file) for file in plan.files]
        self._write(PLAN, {**body, "files": files})

    def place(self, path: str) -> Path:
        """Where a file belongs; its folders are made.

        Raises:
            FetchError: a link would lead elsewhere, or a folder cannot be made.
        """
        place = self.folder
        for part in path.split("/")[:-1]:
            place = place / part
            if place.is_symlink():
                raise FetchError(f"{place} is a symbolic link: remove it")
            try:
                place.mkdir(exist_ok=True)
            except OSError as error:
                raise failed(error, place) from error
        place = place / path.rpartition("/")[2]
        if place.is_symlink():
            raise FetchError(f"{place} is a symbolic link: remove it")
        return place

    def room(self, needed: int) -> None:
        """Check that so many bytes more fit on the volume.

        Raises:
            FetchError: they do not; says how many would.
        """
        room = os.statvfs(self.folder)
        free = room.f_bavail * room.f_frsize
        if needed and needed + SPARE_BYTES > free:
            raise FetchError(
                f"{self.folder} has {free} bytes free, {needed + SPARE_BYTES} are needed: "
                f"make the volume larger by {needed + SPARE_BYTES - free}, or remove other models"
            )

    def finish(self, manifest: Manifest) -> None:
        """Say that the folder is whole, in one step, once everything is on the disk."""
        for entry in manifest.files:
            _sync(self.folder / entry.path)
        for folder in {(self.folder / entry.path).parent for entry in manifest.files}:
            _sync(folder)
        self._write(MANIFEST, {"format": FORMAT, **asdict(manifest)})
        (self.folder / PLAN).unlink(missing_ok=True)

    def clear(self, name: str) -> None:
        """Remove a folder in it, of files that a whole model does not need."""
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            found = json.loads((self.folder / name).read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _write(self, name: str, body: Mapping[str, Any]) -> None:
        new = self.folder / f"{name}.new"
        try:
            with new.open("w") as file:
                json.dump(body, file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.folder / name)
            _sync(self.folder)
        except OSError as error:
            raise failed(error, new) from error


def _noted(file: Remote) -> dict[str, Any]:
    return {"path": file.path, "size": file.size, "digest": file.digest, "version": file.version}


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        logger.warning("the volume has no locks: let no two services fetch one model into it at once")
    return True


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() and not path.is_symlink() else -1


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def failed(error: OSError, path: Path) -> FetchError:
    """What an error of the file system means to the user."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return FetchError(f"{path}: {error.strerror}: make the volume larger, or remove other models")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return FetchError(
            f"{path}: {error.strerror}: user {os.getuid()} must be able to write there; a hostPath must be "
            f"made on the node for it (chown {os.getuid()}), a PersistentVolumeClaim must not be read-only"
        )
    return FetchError(f"{path}: {error.strerror or error}")
