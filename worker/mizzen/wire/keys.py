"""CURVE keys (CurveZMQ, RFC 26) as files: `engine.public`, `engine.secret`, and the same of `gateway`.

A side's folder holds its own pair and the other side's public key. Keys are Z85 text of 40 characters. On
Kubernetes the folder is a mounted Secret; `mizzen serve` makes one for the two processes that it starts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SIDES = ("engine", "gateway")
Z85 = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")
"""The alphabet of ZeroMQ RFC 32."""


class KeyFileError(ValueError):
    """A key file is missing or holds no key."""


@dataclass(frozen=True, slots=True)
class WireKeys:
    """One side's pair, and the public key of the side it talks to."""

    public: bytes
    secret: bytes
    peer: bytes

    def __repr__(self) -> str:
        return f"WireKeys(public={self.public!r}, peer={self.peer!r})"  # the secret stays out of logs


def _read(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise KeyFileError(f"cannot read the key file {path}: {error.strerror}") from error
    if len(key) != 40:
        raise KeyFileError(f"{path} holds {len(key)} characters; a CURVE key in Z85 has 40")
    if not set(key) <= Z85:
        raise KeyFileError(f"{path} holds characters that Z85 does not have; a CURVE key is 40 of Z85")
    return key


def load_keys(folder: Path, side: str) -> WireKeys:
    """Read the keys of `side` ("engine" or "gateway") from a folder.

    Raises:
        KeyFileError: names the file that is missing or malformed.
    """
    other = SIDES[1 - SIDES.index(side)]
    return WireKeys(
        _read(folder / f"{side}.public"), _read(folder / f"{side}.secret"), _read(folder / f"{other}.public")
    )


def load_pair(folder: Path, side: str) -> WireKeys:
    """Read the pair of `side` alone: whom it talks to is known from elsewhere (`WireKeys.peer` is empty).

    Raises:
        KeyFileError: names the file that is missing or malformed.
    """
    return WireKeys(_read(folder / f"{side}.public"), _read(folder / f"{side}.secret"), b"")


def write_keys(folder: Path) -> None:
    """Make fresh keys of both sides in a folder that only this user may read."""
    import zmq

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for side in SIDES:
        for half, key in zip(("public", "secret"), zmq.curve_keypair(), strict=True):
            descriptor = os.open(folder / f"{side}.{half}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(key)
