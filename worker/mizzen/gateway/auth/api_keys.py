# SPDX-License-Identifier: Apache-2.0
"""API key files: YAML (or JSON) with a list of keys, which are hashed as soon as they are read.

    keys:
      - name: team-a
        sha256: 5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef
        models: [chat]
        requestsPerMinute: 600
        tokensPerMinute: 200000
        maxParallel: 32
        priority: 1

A path is a file or a folder of files, such as a mounted Secret. Error messages never contain a key.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import yaml
from yaml.parser import ParserError
from yaml.scanner import ScannerError

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_PRIORITY = 8
"""Largest absolute value of a priority; each step of priority doubles a request's weight in the queue."""
SHORTEST_KEY = 8

Limit = Annotated[int, msgspec.Meta(ge=1, le=10**12)]


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Entry of one key in a file; either `key` (plain text) or `sha256` (hexadecimal digits) is set."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
    key: str | None = None
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    models: tuple[str, ...] = ()
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_parallel: Limit | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    isolate_cache: bool = False


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a key file."""

    keys: tuple[KeyEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Permissions and limits of one key; a limit of None means that there is no limit."""

    name: str
    digest: bytes
    """SHA-256 of the key."""
    models: frozenset[str] = frozenset()
    """Names of the allowed models; all if empty."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_parallel: int | None = None
    priority: int = 0
    """Highest priority that the key's requests may have, and the default priority."""
    weight: float = 1.0
    """Weight of the key's requests in the queue, relative to other keys."""
    salt: bytes = b""
    """Salt of the prefix cache; only requests with equal salts share cached prefixes."""

    def __repr__(self) -> str:
        return f"Grant(name={self.name!r})"  # the digest stays out of logs


class InvalidKeyFile(ValueError):
    """A key file is missing or malformed; the message names the file and the entry, never a key."""


def read_key_files(paths: Iterable[str]) -> dict[Path, bytes]:
    """Return the contents of the files at `paths`; a path may be a folder, whose files are read.

    Raises:
        InvalidKeyFile: a path does not exist or cannot be read, or a file is larger than `MAX_FILE_BYTES`.
    """
    contents: dict[Path, bytes] = {}
    for path in map(Path, paths):
        try:
            for file in sorted(_visible_files(path)) if path.is_dir() else [path]:
                if file.stat().st_size > MAX_FILE_BYTES:
                    raise InvalidKeyFile(f"--api-keys-file {file} has more than {MAX_FILE_BYTES} bytes")
                contents[file] = file.read_bytes()
        except OSError as error:
            raise InvalidKeyFile(f"--api-keys-file {path} cannot be read: {error.strerror}") from error
    return contents


def _visible_files(folder: Path) -> Iterable[Path]:
    """Return the files in a folder, without the entries that Kubernetes adds to a Secret (`..data` etc.)."""
    return (file for file in folder.iterdir() if not file.name.startswith(".") and file.is_file())


def parse_key_files(files: dict[Path, bytes]) -> tuple[Grant, ...]:
    """Return the grants of the keys in all files; `files` maps the path of each file to its content.

    Raises:
        InvalidKeyFile: a file is malformed, or two entries have the same name or the same key.
    """
    grants: dict[str, Grant] = {}
    digests: dict[bytes, str] = {}
    for path, content in files.items():
        for index, entry in enumerate(_decode(path, content).keys):
            where = f"{path}, keys[{index}] ({entry.name})"
            if entry.name in grants:
                raise InvalidKeyFile(f"{where}: another key has this name already; choose another")
            grant = _new_grant(where, entry)
            other = digests.setdefault(grant.digest, entry.name)
            if other != entry.name:
                raise InvalidKeyFile(f"{where}: {other} is the same key; give each holder a different key")
            grants[entry.name] = grant
    return tuple(grants.values())


def _decode(path: Path, content: bytes) -> KeyFile:
    try:
        return msgspec.convert(_read_yaml(content), KeyFile)
    except msgspec.ValidationError as error:
        raise InvalidKeyFile(f"{path}: {error}") from None
    except yaml.MarkedYAMLError as error:  # messages of other types quote the file, so they are not shown
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        shown = type(error) in (yaml.MarkedYAMLError, ScannerError, ParserError)
        raise InvalidKeyFile(
            f"{path}{line}: this is not YAML{f': {error.problem}' if shown else ''}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        raise InvalidKeyFile(f"{path}: this is not YAML") from None
    except (ValueError, LookupError, AttributeError):  # PyYAML's constructors of dates, numbers and booleans
        reason = "a date, a number or a value with a tag cannot be read; put texts in quotes"
        raise InvalidKeyFile(f"{path}: {reason}") from None


def _read_yaml(content: bytes) -> object:
    """Parse YAML, but reject aliases, because a small file with aliases can expand to a huge value.

    Raises:
        yaml.YAMLError: the content is malformed or contains aliases.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, if PyYAML was built with it
    for event in yaml.parse(content, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases are not allowed", problem_mark=event.start_mark)
    return yaml.load(content, Loader=loader)


def _new_grant(where: str, entry: KeyEntry) -> Grant:
    if (entry.key is None) == (entry.sha256 is None):
        raise InvalidKeyFile(f"{where}: give key or sha256, exactly one of them")
    if entry.key is not None and (len(entry.key) < SHORTEST_KEY or any(c.isspace() for c in entry.key)):
        raise InvalidKeyFile(f"{where}: a key has at least {SHORTEST_KEY} characters and no white space")
    hashed = hashlib.sha256((entry.key or "").encode()).digest()
    return Grant(
        name=entry.name,
        digest=bytes.fromhex(entry.sha256) if entry.sha256 else hashed,
        models=frozenset(entry.models),
        requests_per_minute=entry.requests_per_minute,
        tokens_per_minute=entry.tokens_per_minute,
        max_parallel=entry.max_parallel,
        priority=entry.priority,
        weight=entry.weight,
        salt=hashlib.sha256(b"key " + entry.name.encode()).digest()[:16] if entry.isolate_cache else b"",
    )


class ApiKeyIndex:
    """Finds the grant of a presented key; how long a lookup takes reveals nothing about the stored keys."""

    def __init__(self, grants: Iterable[Grant]) -> None:
        self._salt = secrets.token_bytes(32)
        # Indexed by a keyed hash, so that the time of a lookup reveals nothing about the keys.
        self._holders = {self._index(grant.digest): grant for grant in grants}

    def find_grant(self, key: bytes) -> Grant | None:
        """Return the grant of a key, or None if the key is unknown."""
        digest = hashlib.sha256(key).digest()
        grant = self._holders.get(self._index(digest))
        return grant if grant is not None and hmac.compare_digest(grant.digest, digest) else None

    def _index(self, digest: bytes) -> bytes:
        return hmac.digest(self._salt, digest, "sha256")
