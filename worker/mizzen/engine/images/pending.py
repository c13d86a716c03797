# SPDX-License-Identifier: Apache-2.0
"""Decodes the images that requests wait for, and ends the requests whose images cannot be decoded.

`Engine` passes the files of images here, and every `Finished` through `finalize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from mizzen.core.events import ProvideImage
from mizzen.core.images.counts import ImageUse
from mizzen.core.request import Finished, FinishReason, Request
from mizzen.engine.images.decoder import ImageDecoder
from mizzen.engine.images.statistics import ImageStatistics
from mizzen.engine.images.tasks import DecodedImage
from mizzen.images.types import ImageRules, PixelLimits


@dataclass(frozen=True, slots=True)
class ImageServices:
    """Rules of a model for images, and the decoder of its engine."""

    rules: ImageRules
    decoder: ImageDecoder
    encoding_seconds: Callable[[], float] = float
    """Returns the time that the vision encoder has run, in seconds; 0 on a simulated device."""


class ImageFile(Struct, frozen=True, kw_only=True):
    """The file of an image that a request needs."""

    rid: int
    digest: bytes
    content: bytes
    size: tuple[int, int]
    """Width and height in pixels, as displayed, according to the file's header."""
    limits: PixelLimits | None = None


class PendingImages:
    """Images that are being decoded, and the requests that need them. Used from one thread."""

    def __init__(self, services: ImageServices) -> None:
        self.rules = services.rules
        self._decoder = services.decoder
        self._encoding_seconds = services.encoding_seconds
        self._tenants: dict[int, int] = {}
        """Tenant of each live request with images, by request id."""
        self._waiting: dict[bytes, set[int]] = {}
        """Requests for which an image is being decoded, by digest."""
        self._failed: dict[int, DecodedImage] = {}
        """Images that could not be decoded, by the id of a request that is being aborted."""

    def statistics(self, use: ImageUse) -> ImageStatistics:
        """Return the statistics of images; `use` are the counters of the scheduler."""
        return ImageStatistics(
            decoding=self._decoder.counts,
            confined=self._decoder.confined,
            use=use,
            encoding_seconds=self._encoding_seconds(),
        )

    def add_request(self, request: Request) -> None:
        """Add a live request with images."""
        self._tenants[request.rid] = request.tenant

    def decode(self, file: ImageFile) -> None:
        """Start to decode an image; do nothing if its request has ended."""
        tenant = self._tenants.get(file.rid)
        if tenant is None:
            return
        if file.digest in self._waiting:
            self._waiting[file.digest].add(file.rid)
            return
        self._waiting[file.digest] = {file.rid}
        self._decoder.submit(file.digest, file.content, self.rules, file.size, file.limits, tenant=tenant)

    def drain(self) -> tuple[list[ProvideImage], list[int]]:
        """Return images decoded since the last call, and the requests to abort, as their image failed."""
        provided: list[ProvideImage] = []
        aborts: list[int] = []
        for image in self._decoder.drain() if self._waiting else ():
            rids = self._waiting.pop(image.key, set())
            if image.pixels is not None:
                provided.append(ProvideImage(image.key, image.pixels))
                continue
            for rid in rids:
                self._failed[rid] = image
                aborts.append(rid)
        return provided, aborts

    def finalize(self, finished: Iterable[Finished]) -> tuple[Finished, ...]:
        """Forget finished requests and return their results, with an error message for each that failed."""
        return tuple(self._finalize(result) if result.rid in self._tenants else result for result in finished)

    def close(self) -> None:
        """Stop the decoder."""
        self._decoder.close()

    def _finalize(self, finished: Finished) -> Finished:
        rid = finished.rid
        del self._tenants[rid]
        for digest in [digest for digest, rids in self._waiting.items() if rid in rids]:
            self._waiting[digest].discard(rid)
            if not self._waiting[digest]:
                del self._waiting[digest]
                self._decoder.cancel(digest)
        image = self._failed.pop(rid, None)
        if image is None or finished.reason is not FinishReason.ABORT:
            return finished
        return replace(
            finished,
            reason=FinishReason.ERROR,
            message=f"images: {image.error}",
            busy=image.temporary,
            at_fault=not image.temporary,
        )
