"""Which files are fetched, and under which names: pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from mizzen.fetch.errors import FetchError

INCLUDE = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Weights, configuration, templates and tokenizers. Pickles are code: only who names them gets them."""
EXCLUDE = ("original/*", "onnx/*", "consolidated*.safetensors")
"""Second copies of the weights, in other forms."""
OWN = ".mizzen"
"""How names begin that no source may use."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|git:[0-9a-f]{40}|md5:[0-9a-f]{32}|")
_BAD = re.compile(r"[\x00-\x1f\x7f\\]")
MAX_PATH, MAX_PART, MAX_DEPTH = 1024, 255, 16
MAX_FILES = 10_000


@dataclass(frozen=True, slots=True)
class Remote:
    """One file as its server has it.

    Attributes:
        path: below the folder, with slashes.
        size: in bytes.
        digest: `sha256:…`, `md5:…`, or `git:…` (SHA-1 of a git blob); empty when the server gives none.
        url: where its bytes are.
        version: the server's tag of this content; a changed one must not answer. Empty without.
        unpack: it is a tar archive, and its files below this folder in it are wanted; None for a plain file.
    """

    path: str
    size: int
    digest: str
    url: str
    version: str = ""
    unpack: str | None = None

    def __post_init__(self) -> None:
        """Check what a server said.

        Raises:
            FetchError: the path leads out of the folder, or size or digest make no sense.
        """
        safe(self.path)
        if self.size < 0 or not _DIGEST.fullmatch(self.digest):
            raise FetchError(f"{self.path}: the server names size {self.size} and digest {self.digest!r}")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything to fetch; `revision` names this very content for ever."""

    revision: str
    files: tuple[Remote, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Choice:
    """Patterns of paths: a file is taken that matches one of `include` and none of `exclude`."""

    include: tuple[str, ...] = INCLUDE
    exclude: tuple[str, ...] = EXCLUDE

    def takes(self, path: str) -> bool:
        """Whether a path is wanted; hidden files never are."""
        if any(part.startswith(".") for part in path.split("/")):
            return False
        return any(fnmatchcase(path, p) for p in self.include) and not any(
            fnmatchcase(path, p) for p in self.exclude
        )


def safe(path: str) -> str:
    """Return a path that stays below the folder that it is put in.

    Raises:
        FetchError: it does not, or is no name that every file system takes.
    """
    parts = path.split("/")
    if (
        not path
        or len(path.encode(errors="replace")) > MAX_PATH
        or len(parts) > MAX_DEPTH
        or _BAD.search(path)
        or any(part in ("", ".", "..") or len(part.encode(errors="replace")) > MAX_PART for part in parts)
        or parts[0].startswith(OWN)
        or parts[-1].endswith((".partial", ".partial.done"))
        or PurePosixPath(path).is_absolute()
        or path.encode(errors="ignore").decode() != path
    ):
        raise FetchError(f"the source names a file {path[:200]!r}, which is refused: its path is not safe")
    return path


def made(revision: str, files: Iterable[Remote], *, source: str, limit: int) -> Plan:
    """The plan of these files.

    Raises:
        FetchError: there are none, too many, two of one name, or more bytes than `limit` (0 is none).
    """
    chosen = tuple(sorted(files, key=lambda file: file.path))
    if not chosen:
        raise FetchError(f"{source} has no file that is wanted: look at its name, and at --include")
    if len(chosen) > MAX_FILES:
        raise FetchError(
            f"{source} has {len(chosen)} files, more than {MAX_FILES}: name a folder of one model"
        )
    collide(file.path for file in chosen)
    plan = Plan(revision, chosen)
    if limit and plan.size > limit:
        raise FetchError(f"{source} has {plan.size} bytes, more than --max-bytes {limit}")
    return plan


def collide(paths: Iterable[str]) -> None:
    """Check that no path is twice there, or a folder of another one.

    Raises:
        FetchError: names the path.
    """
    known: set[str] = set()
    folders: set[str] = set()
    for path in sorted(paths):
        above = _above(path.split("/"))
        if path in known or path in folders or any(folder in known for folder in above):
            raise FetchError(f"the source names {path!r} twice, or as a file and a folder")
        known.add(path)
        folders.update(above)


def _above(parts: Sequence[str]) -> list[str]:
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
