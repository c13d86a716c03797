# SPDX-License-Identifier: Apache-2.0
"""The folder of a model: its manifest, the plan of an unfinished fetch, and its lock.

The manifest `.mizzen.json` is written last and lists the files of the complete folder. Until then
`.mizzen.plan.json` lists the files to fetch, so that an interrupted fetch resumes with the same revision. The
data of an unfinished file is in `NAME.partial`, its journal in `NAME.partial.done`. Only the process that
holds the lock `.mizzen.lock` writes to the folder.
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
from mizzen.fetch.plan import FetchPlan, RemoteFile, check_path

logger = logging.getLogger(__name__)

MANIFEST, PLAN, LOCK = ".mizzen.json", ".mizzen.plan.json", ".mizzen.lock"
FORMAT = 1
_LOCK_POLL_SECONDS = 0.5
SPARE_BYTES = 16 * 1024 * 1024
"""Free space in bytes that must remain on the volume after the fetch, for file system metadata."""


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """A file of a complete model folder; `size` is in bytes, `digest` is `sha256:…`."""

    path: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Source, revision and files of a complete model folder."""

    source: str
    endpoint: str
    revision: str
    files: tuple[ManifestEntry, ...]

    @property
    def size(self) -> int:
        """Total size of the files in bytes."""
        return sum(entry.size for entry in self.files)


class ModelFolder:
    """The folder of one model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self) -> None:
        """Create the folder if it does not exist, and check that it is writable.

        Raises:
            FetchError: the folder cannot be created or is not writable.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise filesystem_error(error, self.folder) from error

    @contextmanager
    def lock(self, seconds: float, check: Callable[[], None], on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the folder's exclusive lock while the context is active.

        The kernel releases the lock if the process dies.

        Args:
            seconds: maximum time to wait while another process holds the lock.
            check: called regularly while waiting; may raise to stop.
            on_wait: called once if another process holds the lock.

        Raises:
            FetchError: another process still holds the lock after `seconds`.
        """
        deadline, reported = time.monotonic() + seconds, False
        try:
            descriptor = os.open(
                self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            raise filesystem_error(error, self.folder / LOCK) from error
        try:
            while not _try_lock(descriptor):
                if not reported:
                    on_wait()
                    reported = True
                if time.monotonic() >= deadline:
                    raise FetchError(
                        f"another fetch has held {self.folder / LOCK} for {seconds:g} s: look for its pod"
                    )
                check()
                time.sleep(_LOCK_POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)

    def read_complete(self, source: str, endpoint: str) -> Manifest | None:
        """Return the manifest if the folder is complete, or None if files must be fetched.

        Raises:
            FetchError: the folder contains a model from another source or endpoint.
        """
        body = self._read(MANIFEST)
        if body is None:
            return None
        try:
            manifest = Manifest(
                body["source"],
                body["endpoint"],
                body["revision"],
                tuple(
                    ManifestEntry(check_path(entry["path"]), entry["size"], entry["digest"])
                    for entry in body["files"]
                ),
            )
        except (KeyError, TypeError, AttributeError):
            return None
        if (manifest.source, manifest.endpoint) != (source, endpoint):
            raise FetchError(
                f"{self.folder} contains {manifest.source!r}, not {source!r}: "
                "choose another folder, or empty this one"
            )
        complete = all(_file_size(self.folder / entry.path) == entry.size for entry in manifest.files)
        return manifest if complete else None

    def planned_revision(self, source: str) -> str:
        """Return the revision that an unfinished fetch of the source has planned, or an empty string."""
        plan = self._read(PLAN)
        return str(plan.get("revision", "")) if plan and plan.get("source") == source else ""

    def save_plan(self, source: str, plan: FetchPlan) -> None:
        """Save a plan, and remove each file of an earlier plan that the new plan does not list unchanged."""
        before = self._read(PLAN) or {}
        now = {file.path: (file.size, file.digest, file.version) for file in plan.files}
        for old in before.get("files", []):
            try:
                path = check_path(old["path"])
                kept = now.get(path) == (old["size"], old["digest"], old["version"])
            except (KeyError, TypeError, AttributeError, FetchError):
                continue
            for name in () if kept else (path, f"{path}.partial", f"{path}.partial.done"):
                self.path_of(name).unlink(missing_ok=True)
        body = {"format": FORMAT, "source": source, "revision": plan.revision}
        files = [_plan_entry(file) for file in plan.files]
        self._write(PLAN, {**body, "files": files})

    def path_of(self, path: str) -> Path:
        """Return the absolute path of a file in the folder, and create its parent folders.

        Raises:
            FetchError: a part of the path is a symbolic link, or a parent folder cannot be created.
        """
        target = self.folder
        for part in path.split("/")[:-1]:
            target = target / part
            if target.is_symlink():
                raise FetchError(f"{target} is a symbolic link: remove it")
            try:
                target.mkdir(exist_ok=True)
            except OSError as error:
                raise filesystem_error(error, target) from error
        target = target / path.rpartition("/")[2]
        if target.is_symlink():
            raise FetchError(f"{target} is a symbolic link: remove it")
        return target

    def check_space(self, needed: int) -> None:
        """Check that `needed` more bytes fit on the volume.

        Raises:
            FetchError: the bytes and `SPARE_BYTES` do not fit; the message says how many are missing.
        """
        volume = os.statvfs(self.folder)
        free = volume.f_bavail * volume.f_frsize
        if needed and needed + SPARE_BYTES > free:
            raise FetchError(
                f"{self.folder} has {free} free bytes, but {needed + SPARE_BYTES} are needed: "
                f"make the volume larger by {needed + SPARE_BYTES - free}, or remove other models"
            )

    def mark_complete(self, manifest: Manifest) -> None:
        """Sync all files to disk, then write the manifest atomically and remove the plan."""
        for entry in manifest.files:
            _fsync(self.folder / entry.path)
        for folder in {(self.folder / entry.path).parent for entry in manifest.files}:
            _fsync(folder)
        self._write(MANIFEST, {"format": FORMAT, **asdict(manifest)})
        (self.folder / PLAN).unlink(missing_ok=True)

    def remove_subfolder(self, name: str) -> None:
        """Remove a subfolder and all files in it, if it exists."""
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            body = json.loads((self.folder / name).read_bytes())
        except (OSError, ValueError):
            return None
        return body if isinstance(body, dict) else None

    def _write(self, name: str, body: Mapping[str, Any]) -> None:
        new = self.folder / f"{name}.new"
        try:
            with new.open("w") as file:
                json.dump(body, file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.folder / name)
            _fsync(self.folder)
        except OSError as error:
            raise filesystem_error(error, new) from error


def _plan_entry(file: RemoteFile) -> dict[str, Any]:
    return {"path": file.path, "size": file.size, "digest": file.digest, "version": file.version}


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        logger.warning(
            "the volume does not support file locks: two services must not fetch one model into it at once"
        )
    return True


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.is_file() and not path.is_symlink() else -1


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def filesystem_error(error: OSError, path: Path) -> FetchError:
    """Return a FetchError for an error of the file system at `path`, with advice on how to fix it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return FetchError(f"{path}: {error.strerror}: make the volume larger, or remove other models")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return FetchError(
            f"{path}: {error.strerror}: user {os.getuid()} must be able to write there: create a hostPath on "
            f"the node with that owner (chown {os.getuid()}); a PersistentVolumeClaim must not be read-only"
        )
    return FetchError(f"{path}: {error.strerror or error}")
