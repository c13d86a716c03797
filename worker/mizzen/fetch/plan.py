# SPDX-License-Identifier: Apache-2.0
"""The plan of a fetch: the files to fetch and their paths. This module does no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from mizzen.fetch.errors import FetchError

INCLUDE = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Default patterns of files to fetch: weights, configuration, templates and tokenizers. Pickles are not among
them, because they may contain code."""
EXCLUDE = ("original/*", "onnx/*", "consolidated*.safetensors")
"""Default patterns of files to skip: copies of the weights in other formats."""
RESERVED_PREFIX = ".mizzen"
"""Prefix of Mizzen's own files in a model folder; paths of a source must not start with it."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|git:[0-9a-f]{40}|md5:[0-9a-f]{32}|")
_BAD = re.compile(r"[\x00-\x1f\x7f\\]")
MAX_PATH, MAX_PART, MAX_DEPTH = 1024, 255, 16
MAX_FILES = 10_000


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file or archive on a server.

    Attributes:
        path: path of the file relative to the model folder, with slashes.
        size: size in bytes.
        digest: `sha256:…`, `md5:…`, or `git:…` (SHA-1 of a git blob); empty if the server provides none.
        url: URL from which the content is downloaded.
        version: ETag of the content, sent as `If-Match`; empty if unknown.
        unpack: for a tar archive, the folder to extract from it (empty: all files); None for a plain file.
    """

    path: str
    size: int
    digest: str
    url: str
    version: str = ""
    unpack: str | None = None

    def __post_init__(self) -> None:
        """Check the values, which come from the server.

        Raises:
            FetchError: the path is unsafe, or the size or the digest is invalid.
        """
        check_path(self.path)
        if self.size < 0 or not _DIGEST.fullmatch(self.digest):
            raise FetchError(
                f"{self.path}: the server reports the size {self.size} and the digest {self.digest!r}"
            )


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """The files of a model to fetch; `revision` identifies their exact content."""

    revision: str
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        """Total size of the files in bytes."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Listing:
    """Files of a source.

    Attributes:
        sizes: size in bytes of each file, by its path.
        contents: content of the files that were read, by their paths.
    """

    sizes: Mapping[str, int]
    contents: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class FileFilter:
    """Filter that selects files whose path matches a pattern in `include` and no pattern in `exclude`."""

    include: tuple[str, ...] = INCLUDE
    exclude: tuple[str, ...] = EXCLUDE

    def matches(self, path: str) -> bool:
        """Return whether the filter selects a path; it never selects hidden files or files in hidden
        folders."""
        if any(part.startswith(".") for part in path.split("/")):
            return False
        return any(fnmatchcase(path, p) for p in self.include) and not any(
            fnmatchcase(path, p) for p in self.exclude
        )


def check_path(path: str) -> str:
    """Return `path` if it stays within its folder and is valid on every file system.

    Raises:
        FetchError: the path is unsafe, not portable or reserved.
    """
    parts = path.split("/")
    if (
        not path
        or len(path.encode(errors="replace")) > MAX_PATH
        or len(parts) > MAX_DEPTH
        or _BAD.search(path)
        or any(part in ("", ".", "..") or len(part.encode(errors="replace")) > MAX_PART for part in parts)
        or parts[0].startswith(RESERVED_PREFIX)
        or parts[-1].endswith((".partial", ".partial.done"))
        or PurePosixPath(path).is_absolute()
        or path.encode(errors="ignore").decode() != path
    ):
        raise FetchError(f"the source has a file {path[:200]!r}, which is rejected: its path is not safe")
    return path


def make_plan(revision: str, files: Iterable[RemoteFile], *, source: str, limit: int) -> FetchPlan:
    """Return a plan for the given files, sorted by path.

    Args:
        revision: revision of the plan.
        files: files to fetch.
        source: URI of the source, for messages.
        limit: maximum total size in bytes; 0 means no limit.

    Raises:
        FetchError: there are no files or more than `MAX_FILES`, two paths collide, or the files exceed
            `limit`.
    """
    chosen = tuple(sorted(files, key=lambda file: file.path))
    if not chosen:
        raise FetchError(f"{source} has no matching file: check its name and --include")
    if len(chosen) > MAX_FILES:
        raise FetchError(f"{source} has {len(chosen)} files, more than {MAX_FILES}: use one model's folder")
    check_collisions(file.path for file in chosen)
    plan = FetchPlan(revision, chosen)
    if limit and plan.size > limit:
        raise FetchError(f"{source} has {plan.size} bytes, more than --max-bytes {limit}")
    return plan


def check_collisions(paths: Iterable[str]) -> None:
    """Check that no path occurs twice or is a parent folder of another path.

    Raises:
        FetchError: two paths collide; the message names one of them.
    """
    known: set[str] = set()
    folders: set[str] = set()
    for path in sorted(paths):
        parents = _parent_folders(path.split("/"))
        if path in known or path in folders or any(folder in known for folder in parents):
            raise FetchError(f"the source has {path!r} twice, or as both a file and a folder")
        known.add(path)
        folders.update(parents)


def _parent_folders(parts: Sequence[str]) -> list[str]:
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
