# SPDX-License-Identifier: Apache-2.0
"""Fetches the images that the engine lacks from the gateways, and assembles their parts.

An image is requested once, from the gateway of one of the requests that need it (its *source*). If the source
ends before the image has arrived, another request becomes the source. The server requests an image only if
the limits allow it in addition to the images that are being transferred; other images wait. Gateways that
send only requested images therefore never exceed the limits. If a gateway sends a part that was not
requested, the server ends the request that the part names, and no other request. The server also ends a
request if the next part of its image does not arrive in time. A thread checks the digest of a complete image,
because hashing would delay steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from mizzen.core.images.types import MissingImages
from mizzen.wire.codec import encode
from mizzen.wire.limits import WireLimits
from mizzen.wire.messages import ImageContent, ImageReference, NeedImages
from mizzen.wire.server.image_validation import ImageModel
from mizzen.wire.server.outbox import Outbox
from mizzen.wire.server.peers import Peer
from mizzen.wire.server.request_table import NO_OWNER

RequestKey = tuple[int, int]
"""A request: its id, and the generation of the id, which changes when the id is reused."""


@dataclass(frozen=True, slots=True)
class ReceivedImage:
    """A complete image with the digest that its reference has."""

    rid: int
    """One of the requests that need the image."""
    reference: ImageReference
    content: bytes


@dataclass(slots=True)
class _Transfer:
    """An image that is requested or waits for it. `waiting` are the requests that need it, in order."""

    reference: ImageReference
    waiting: list[RequestKey]
    source: RequestKey | None = None
    """The request from whose gateway the image was requested."""
    owner: int = NO_OWNER
    """Index of the gateway of `source`."""
    parts: list[bytes] = field(default_factory=list)
    received: int = 0
    deadline: float = 0.0
    check: Future[tuple[bytes, bool]] | None = None
    """Content, and whether it has the digest; set when all parts have arrived."""


class ImageTransfers:
    """Images under way from gateways to the engine. For use from the server's thread."""

    def __init__(self, model: ImageModel, out: Outbox, limits: WireLimits) -> None:
        self._model = model
        self._out = out
        self._limits = limits
        self._references: dict[int, tuple[int, dict[bytes, ImageReference]]] = {}
        """Generation and references, without positions, of requests with images, by request id; requests
        that have ended stay until their id is reused."""
        self._transfers: dict[bytes, _Transfer] = {}
        self._executor = ThreadPoolExecutor(1, "wire-images")

    def __len__(self) -> int:
        """Return the number of images that are requested, wait for it or are being checked."""
        return len(self._transfers)

    @property
    def buffered_bytes(self) -> int:
        """Number of bytes of incomplete images."""
        return sum(transfer.received for transfer in self._transfers.values())

    @property
    def checking(self) -> bool:
        """Whether the digest of an image is being computed."""
        return any(transfer.check is not None for transfer in self._transfers.values())

    def add(self, rid: int, references: Sequence[ImageReference]) -> None:
        """Record the images of a new request."""
        short = {
            reference.digest: msgspec.structs.replace(reference, positions=b"") for reference in references
        }
        self._references[rid] = (int(self._out.table.generation[rid]), short)

    def request(self, missing: Sequence[MissingImages]) -> None:
        """Record images that live requests need; `update` sends the messages."""
        for entry in missing:
            generation, references = self._references.get(entry.rid, (-1, {}))
            key = (entry.rid, generation)
            if not self._is_live(key):
                continue
            for digest in entry.digests:
                transfer = self._transfers.get(digest)
                if transfer is None and digest in references:
                    self._transfers[digest] = _Transfer(references[digest], [key])
                elif transfer is not None and key not in transfer.waiting:
                    transfer.waiting.append(key)

    def add_part(self, peer: Peer, message: ImageContent, now: float) -> None:
        """Add a received part; end the request if the part is not the next one of an image that was
        requested for it. Parts of requests that have ended are ignored."""
        rid = peer.handles.get(message.rid)
        if rid is None:
            return
        transfer = self._transfers.get(message.digest)
        if transfer is None or transfer.source is None or transfer.source[0] != rid or transfer.check:
            self._reject(rid, "parts", "images: the gateway sent a part of an image that was not requested")
            return
        size, received = transfer.reference.size, transfer.received
        if message.offset != received or not 0 < len(message.content) <= size - received:
            self._reject(
                rid,
                "parts",
                f"images: {len(message.content)} bytes at offset {message.offset} are not the next part of "
                f"an image of {size} bytes ({received} have arrived)",
            )
            return
        transfer.parts.append(message.content)
        transfer.received += len(message.content)
        transfer.deadline = now + self._limits.image_seconds
        self._out.counters.image_bytes += len(message.content)
        if transfer.received == size:
            transfer.check = self._executor.submit(self._check, transfer.reference, tuple(transfer.parts))
            transfer.parts.clear()

    def update(self, now: float) -> list[ReceivedImage]:
        """Return complete images; drop the images of requests that have ended or whose time is over, and
        request the next ones."""
        complete: list[ReceivedImage] = []
        for digest, transfer in tuple(self._transfers.items()):
            transfer.waiting = [key for key in transfer.waiting if self._is_live(key)]
            if transfer.check is not None:
                if transfer.check.done():
                    complete += self._finish(transfer, *transfer.check.result())
            elif transfer.source is not None:
                self._check_source(transfer, now)
            if not transfer.waiting:
                del self._transfers[digest]
        self._send_requests(now)
        return complete

    def close(self) -> None:
        """Drop all images."""
        self._transfers.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _is_live(self, key: RequestKey) -> bool:
        rid, generation = key
        table = self._out.table
        return int(table.generation[rid]) == generation and int(table.owner[rid]) != NO_OWNER

    def _check(self, reference: ImageReference, parts: tuple[bytes, ...]) -> tuple[bytes, bool]:
        content = b"".join(parts)
        try:
            return content, self._model.hash_content(reference, content) == reference.digest
        except ValueError:
            return content, False

    def _finish(self, transfer: _Transfer, content: bytes, valid: bool) -> list[ReceivedImage]:
        """Return the image for the first request that waits for it, and end the transfer; if the digest is
        not `valid`, try the next source."""
        if not valid:
            if transfer.source in transfer.waiting:
                self._reject(transfer.source[0], "digest", "images: an image does not have the digest given")
            self._restart(transfer)
            return []
        self._out.counters.images_received += 1
        waiting, transfer.waiting = transfer.waiting, []
        return [ReceivedImage(rid, transfer.reference, content) for rid, _ in waiting[:1]]

    def _check_source(self, transfer: _Transfer, now: float) -> None:
        source = transfer.source
        if source not in transfer.waiting:
            self._restart(transfer)
        elif now >= transfer.deadline:
            seconds = self._limits.image_seconds
            text = f"images: no further part of an image arrived within {seconds:g} s"
            self._reject(source[0], "late", text, at_fault=False)
            self._restart(transfer)

    def _restart(self, transfer: _Transfer) -> None:
        """Discard what has arrived; the image is then requested for the next request that needs it."""
        transfer.waiting = [key for key in transfer.waiting if self._is_live(key)]
        transfer.source, transfer.owner, transfer.check = None, NO_OWNER, None
        transfer.parts, transfer.received = [], 0

    def _reject(self, rid: int, reason: str, text: str, *, at_fault: bool = True) -> None:
        self._out.counters.images_rejected[reason] += 1
        self._out.fail(rid, text, at_fault=at_fault)

    def _send_requests(self, now: float) -> None:
        """Request images in order, as long as those under way fit the limits."""
        requested: dict[RequestKey, list[bytes]] = {}
        total, by_owner = 0, dict[int, int]()
        for transfer in self._transfers.values():
            if transfer.source is not None:
                total += transfer.reference.size
                by_owner[transfer.owner] = by_owner.get(transfer.owner, 0) + transfer.reference.size
        limits = self._limits
        for transfer in self._transfers.values():
            if transfer.source is not None:
                continue
            key, size = transfer.waiting[0], transfer.reference.size
            owner = int(self._out.table.owner[key[0]])
            used = by_owner.get(owner, 0)
            fits = total + size <= limits.image_bytes and used + size <= limits.gateway_image_bytes
            if total and not fits:
                continue
            total, by_owner[owner] = total + size, used + size
            transfer.source, transfer.owner = key, owner
            transfer.deadline = now + limits.image_seconds
            requested.setdefault(key, []).append(transfer.reference.digest)
        for (rid, _), digests in requested.items():
            peer = self._out.peers.at(int(self._out.table.owner[rid]))
            if peer is not None:
                self._out.counters.images_requested += len(digests)
                self._out.send_to(peer, encode(NeedImages(int(self._out.table.handle[rid]), tuple(digests))))
