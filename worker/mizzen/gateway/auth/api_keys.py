"""API keys as files: YAML (or JSON) with a list of keys, hashed as soon as they are read.

    keys:
      - name: team-a
        sha256: 5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef
        models: [chat]
        requestsPerMinute: 600
        tokensPerMinute: 200000
        maxParallel: 32
        priority: 1

A path is a file or a folder of files, such as a mounted Secret. No text of an error holds a key.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import yaml
from yaml.parser import ParserError
from yaml.scanner import ScannerError

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_PRIORITY = 8
"""Each step of priority doubles a request's share; from -8 to 8."""
SHORTEST_KEY = 8

Limit = Annotated[int, msgspec.Meta(ge=1, le=10**12)]


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """One key in a file: `key` in plain text, or its SHA-256 in hexadecimal digits."""

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
    """A file of keys."""

    keys: tuple[KeyEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What the holder of one key may do; None is no limit."""

    name: str
    digest: bytes
    """SHA-256 of the key."""
    models: frozenset[str] = frozenset()
    """Names of models; all when empty."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_parallel: int | None = None
    priority: int = 0
    """Of its requests, unless they ask for less."""
    weight: float = 1.0
    """Its share of the engines beside other keys."""
    salt: bytes = b""
    """Only requests of equal salts share cached prefixes."""

    def __repr__(self) -> str:
        return f"Grant(name={self.name!r})"  # the digest stays out of logs


def divide_limits(grant: Grant, parts: int) -> Grant:
    """Return a grant of which this gateway gives one part; never less than one of anything."""

    def part(limit: int | None) -> int | None:
        return None if limit is None else -(-limit // parts)

    return replace(
        grant,
        requests_per_minute=part(grant.requests_per_minute),
        tokens_per_minute=part(grant.tokens_per_minute),
        max_parallel=part(grant.max_parallel),
    )


class InvalidKeyFile(ValueError):
    """A file of keys is missing or malformed; the text names the file and the entry, never a key."""


def read_key_files(paths: Iterable[str]) -> dict[Path, bytes]:
    """Return the contents of the files at `paths`, and of those in folders among them.

    Raises:
        KeysUnusable: a path is not there or cannot be read, or a file is too large.
    """
    found: dict[Path, bytes] = {}
    for path in map(Path, paths):
        try:
            for file in sorted(_visible(path)) if path.is_dir() else [path]:
                if file.stat().st_size > MAX_FILE_BYTES:
                    raise InvalidKeyFile(f"--api-keys-file {file} has more than {MAX_FILE_BYTES} bytes")
                found[file] = file.read_bytes()
        except OSError as error:
            raise InvalidKeyFile(f"--api-keys-file {path} cannot be read: {error.strerror}") from error
    return found


def _visible(folder: Path) -> Iterable[Path]:
    """A mounted Secret's files; what begins with a dot is Kubernetes' own book-keeping."""
    return (file for file in folder.iterdir() if not file.name.startswith(".") and file.is_file())


def parse_key_files(files: dict[Path, bytes]) -> tuple[Grant, ...]:
    """Return the keys of all files.

    Raises:
        KeysUnusable: a file is malformed, or two entries have one name or one key.
    """
    grants: dict[str, Grant] = {}
    digests: dict[bytes, str] = {}
    for path, content in files.items():
        for index, entry in enumerate(_decode(path, content).keys):
            where = f"{path}, keys[{index}] ({entry.name})"
            if entry.name in grants:
                raise InvalidKeyFile(f"{where}: another key has this name already; choose another")
            grant = _grant(where, entry)
            other = digests.setdefault(grant.digest, entry.name)
            if other != entry.name:
                raise InvalidKeyFile(f"{where}: {other} is the same key; give each holder a key of its own")
            grants[entry.name] = grant
    return tuple(grants.values())


def _decode(path: Path, content: bytes) -> KeyFile:
    try:
        return msgspec.convert(_read_yaml(content), KeyFile)
    except msgspec.ValidationError as error:
        raise InvalidKeyFile(f"{path}: {error}") from None
    except yaml.MarkedYAMLError as error:  # the text of all but these quotes the file, so it is not shown
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        shown = type(error) in (yaml.MarkedYAMLError, ScannerError, ParserError)
        raise InvalidKeyFile(
            f"{path}{line}: this is no YAML{f': {error.problem}' if shown else ''}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        raise InvalidKeyFile(f"{path}: this is no YAML") from None
    except (ValueError, LookupError, AttributeError):  # PyYAML's makers of dates, numbers and booleans
        reason = "a date, a number or a value with a tag cannot be read; put texts in quotes"
        raise InvalidKeyFile(f"{path}: {reason}") from None


def _read_yaml(content: bytes) -> object:
    """Return what YAML says, without aliases, which could make a small file huge.

    Raises:
        yaml.YAMLError: it is malformed, or has aliases.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, where PyYAML was built with it
    for event in yaml.parse(content, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases are not read", problem_mark=event.start_mark)
    return yaml.load(content, Loader=loader)


def _grant(where: str, entry: KeyEntry) -> Grant:
    if (entry.key is None) == (entry.sha256 is None):
        raise InvalidKeyFile(f"{where}: give key or sha256, one of them")
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
    """Finds the holder of a presented key in constant time, whatever its number of right characters."""

    def __init__(self, grants: Iterable[Grant]) -> None:
        self._salt = secrets.token_bytes(32)
        # An index by a keyed hash: what a look-up takes says nothing about the keys.
        self._holders = {self._index(grant.digest): grant for grant in grants}

    def find_grant(self, key: bytes) -> Grant | None:
        """Return what the holder of a key may do; None for a key that nobody holds."""
        digest = hashlib.sha256(key).digest()
        grant = self._holders.get(self._index(digest))
        return grant if grant is not None and hmac.compare_digest(grant.digest, digest) else None

    def _index(self, digest: bytes) -> bytes:
        return hmac.digest(self._salt, digest, "sha256")
