# SPDX-License-Identifier: Apache-2.0
"""CURVE keys (CurveZMQ, RFC 26) in files: `engine.public`, `engine.secret`, and the same for `gateway`.

The two sides are engine and gateway. A side's folder contains its own key pair and the other side's public
key, each as 40 characters of Z85. On Kubernetes the folder is a mounted Secret; `mizzen serve` creates one
for the two processes that it starts.

During a rotation two generations of keys exist, and both are accepted: the files of the next generation have
the prefix `next.`. The file `generation` contains the number of the current engine key (0 if the file is
absent).
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

log = logging.getLogger(__name__)

SIDES = ("engine", "gateway")
NEXT = "next."
Z85 = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")
"""The Z85 alphabet of ZeroMQ RFC 32."""
MAX_GENERATION_DIGITS = 18
"""Maximum number of digits of a generation number."""


class KeyFileError(ValueError):
    """A key file is missing or does not contain a valid key."""


@dataclass(frozen=True, slots=True)
class WireKeys:
    """One side's key pair, and the public key of the other side (`peer`)."""

    public: bytes
    secret: bytes
    peer: bytes

    def __repr__(self) -> str:
        return f"WireKeys(public={self.public!r}, peer={self.peer!r})"  # without the secret, for logs

    @property
    def ring(self) -> KeyRing:
        """Key ring with these keys as its only generation."""
        return KeyRing((KeyPair(self.public, self.secret),), (self.peer,) if self.peer else ())


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A key pair of one side, from one key generation."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys of one side: those of the current generation and, during a rotation, of the next one.

    Attributes:
        own: key pairs of this side, the current one first.
        peers: public keys of the other side, the current one first; empty if they were not read.
        generation: number of the engine's current key, which determines the engine's port.
    """

    own: tuple[KeyPair, ...]
    peers: tuple[bytes, ...]
    generation: int = 0


def key_pair_name(engine_public: bytes, gateway_public: bytes) -> str:
    """Return a short name of a connection's keys for logs and reports, which must not contain keys."""
    return hashlib.sha256(engine_public + b" " + gateway_public).hexdigest()[:16]


def _read(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise KeyFileError(f"cannot read the key file {path}: {error.strerror}") from error
    if len(key) != 40:
        raise KeyFileError(f"{path} contains {len(key)} characters; a CURVE key in Z85 has 40")
    if not set(key) <= Z85:
        raise KeyFileError(f"{path} contains characters outside Z85; a CURVE key has 40 characters of Z85")
    try:
        z85.decode(key)
    except struct.error as error:  # five characters encode 32 bits, and may encode a larger number
        raise KeyFileError(f"{path} contains Z85 characters that do not decode to a CURVE key") from error
    return key


def _pair(folder: Path, name: str) -> KeyPair:
    public, secret = folder / f"{name}.public", folder / f"{name}.secret"
    pair = KeyPair(_read(public), _read(secret))
    if zmq.curve_public(pair.secret) != pair.public:
        raise KeyFileError(f"{public} is not the public key of {secret}")
    return pair


def load_ring(folder: Path, side: str, *, peers: bool = True) -> KeyRing:
    """Read the keys of `side` ("engine" or "gateway"); during a key rotation, read both generations.

    Args:
        folder: folder that contains the key files.
        side: side whose key pairs are read.
        peers: whether the other side's public keys are read too.

    Raises:
        KeyFileError: a file is missing or malformed, or two files do not form a key pair. The text names the
            files.
    """
    try:
        return _load(folder, side, peers)
    except OSError as error:
        raise KeyFileError(f"cannot read the key folder {folder}: {error.strerror}") from error


def _load(folder: Path, side: str, peers: bool) -> KeyRing:
    # Kubernetes updates a mounted Secret by pointing the link `..data` to another folder. Resolving it once
    # makes all files come from the same version.
    folder = (folder / "..data").resolve() if (folder / "..data").exists() else folder
    other = SIDES[1 - SIDES.index(side)]
    own = [_pair(folder, side)]
    if (folder / f"{NEXT}{side}.secret").exists():
        own.append(_pair(folder, NEXT + side))
    known = [_read(folder / f"{other}.public")] if peers else []
    if peers and (folder / f"{NEXT}{other}.public").exists():
        known.append(_read(folder / f"{NEXT}{other}.public"))
    return KeyRing(tuple(own), tuple(known), _generation(folder / "generation"))


def find_pair(folder: Path, side: str, public: str) -> KeyPair:
    """Search both key generations of `side` for the pair with the given public key, and return it.

    Raises:
        KeyFileError: a file is missing or malformed, or the folder has no such pair; the text names the
            file or the folder.
    """
    for pair in load_ring(folder, side, peers=False).own:
        if pair.public == public.encode():
            return pair
    raise KeyFileError(f"{folder} has no {side} key pair whose public key is {public}")


def _generation(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeyFileError(f"{path} must contain a whole number, not {error.object[:40]!r}") from error
    if not (text.isascii() and text.isdecimal()):
        raise KeyFileError(f"{path} must contain a whole number, not {text[:40]!r}")
    if len(text) > MAX_GENERATION_DIGITS:
        raise KeyFileError(
            f"{path} has a number of {len(text)} digits; at most {MAX_GENERATION_DIGITS} are allowed"
        )
    return int(text)


class KeyFolder:
    """The keys in a folder; `refresh` reads them again, and keeps the previous keys if a file is unusable."""

    def __init__(self, folder: Path, side: str, *, peers: bool = True) -> None:
        """Read the keys of `side` ("engine" or "gateway") from `folder`.

        `peers` decides whether the other side's public keys are read too.

        Raises:
            KeyFileError: a file is missing or malformed; the text names the file.
        """
        self._folder, self._side, self._peers = folder, side, peers
        self._problem = ""
        self.ring = load_ring(folder, side, peers=peers)

    def refresh(self) -> bool:
        """Read the folder again; return whether the keys have changed. An unusable file is logged."""
        try:
            ring = load_ring(self._folder, self._side, peers=self._peers)
        except KeyFileError as error:
            if str(error) != self._problem:  # log each problem once
                log.error("cannot read the CURVE keys", extra={"fields": {"reason": str(error)}})
            self._problem = str(error)
            return False
        self._problem = ""
        changed, self.ring = ring != self.ring, ring
        if changed:
            fields = {"generation": ring.generation, "generations": len(ring.own)}
            log.info("CURVE keys reloaded", extra={"fields": fields})
        return changed


def write_keys(folder: Path) -> None:
    """Generate a key pair for each side and write it to files that only this user may read."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for side in SIDES:
        for half, key in zip(("public", "secret"), zmq.curve_keypair(), strict=True):
            descriptor = os.open(folder / f"{side}.{half}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(key)
