"""CURVE keys (CurveZMQ, RFC 26) as files: `engine.public`, `engine.secret`, and the same for `gateway`.

A side's folder contains its own pair and the other side's public key. Keys are Z85 text of 40 characters. On
Kubernetes the folder is a mounted Secret; `mizzen serve` creates one for the two processes that it starts.

During a rotation there are two generations, and both are accepted: the files of the next one have the prefix
`next.`, and the file `generation` contains the number of the current engine key (0 if absent).
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
MOST_DIGITS = 18
"""Maximum number of digits of a generation number."""


class KeyFileError(ValueError):
    """A key file is missing or does not contain a key."""


@dataclass(frozen=True, slots=True)
class WireKeys:
    """One side's key pair, and the public key of its peer."""

    public: bytes
    secret: bytes
    peer: bytes

    def __repr__(self) -> str:
        return f"WireKeys(public={self.public!r}, peer={self.peer!r})"  # the secret stays out of logs

    @property
    def ring(self) -> KeyRing:
        """A key ring with these keys as its only generation."""
        return KeyRing((KeyPair(self.public, self.secret),), (self.peer,) if self.peer else ())


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One side's key pair of one generation."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys of one side: the current generation and, during a rotation, the next one after it.

    Attributes:
        own: key pairs of this side.
        peers: public keys of the other side; empty if they come from elsewhere.
        generation: number of the engine's current key, which determines its port.
    """

    own: tuple[KeyPair, ...]
    peers: tuple[bytes, ...]
    generation: int = 0


def key_pair_name(engine_public: bytes, gateway_public: bytes) -> str:
    """Return a short name of a connection's keys, for places that must not show the keys."""
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
    except struct.error as error:  # five characters encode 32 bits, and may exceed them
        raise KeyFileError(f"{path} contains Z85 characters that do not decode to a CURVE key") from error
    return key


def _pair(folder: Path, name: str) -> KeyPair:
    public, secret = folder / f"{name}.public", folder / f"{name}.secret"
    pair = KeyPair(_read(public), _read(secret))
    if zmq.curve_public(pair.secret) != pair.public:
        raise KeyFileError(f"{public} is not the public key of {secret}")
    return pair


def load_ring(folder: Path, side: str, *, peers: bool = True) -> KeyRing:
    """Read the keys of `side`, of one or two generations; without `peers` only its own pairs.

    Raises:
        KeyFileError: a file is missing or malformed, or two files are not a key pair; the text names it.
    """
    try:
        return _load(folder, side, peers)
    except OSError as error:
        raise KeyFileError(f"cannot read the key folder {folder}: {error.strerror}") from error


def _load(folder: Path, side: str, peers: bool) -> KeyRing:
    # A mounted Secret changes atomically, by a link to another folder: all files read belong together.
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
    """Return the key pair of `side` with the given public key, of any generation.

    Raises:
        KeyFileError: a file is missing or malformed, or the folder has no such pair; the text names it.
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
    if len(text) > MOST_DIGITS:
        raise KeyFileError(f"{path} has a number of {len(text)} digits; at most {MOST_DIGITS} are allowed")
    return int(text)


class KeyFolder:
    """The keys of a folder, read again by `refresh`; the previous keys stay if files are unusable."""

    def __init__(self, folder: Path, side: str, *, peers: bool = True) -> None:
        """Read the folder.

        Raises:
            KeyFileError: a file is missing or malformed; the text names it.
        """
        self._folder, self._side, self._peers = folder, side, peers
        self._problem = ""
        self.ring = load_ring(folder, side, peers=peers)

    def refresh(self) -> bool:
        """Read the folder again; return whether the keys have changed."""
        try:
            ring = load_ring(self._folder, self._side, peers=self._peers)
        except KeyFileError as error:
            if str(error) != self._problem:  # log each problem once
                log.error("keys cannot be read", extra={"fields": {"reason": str(error)}})
            self._problem = str(error)
            return False
        self._problem = ""
        changed, self.ring = ring != self.ring, ring
        if changed:
            fields = {"generation": ring.generation, "generations": len(ring.own)}
            log.info("keys reloaded", extra={"fields": fields})
        return changed


def write_keys(folder: Path) -> None:
    """Generate keys of both sides in a folder that only this user may read."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for side in SIDES:
        for half, key in zip(("public", "secret"), zmq.curve_keypair(), strict=True):
            descriptor = os.open(folder / f"{side}.{half}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(key)
