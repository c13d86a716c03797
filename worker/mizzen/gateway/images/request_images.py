# SPDX-License-Identifier: Apache-2.0
"""Images of a request in the order of their parts: their sources in the body, and their files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from mizzen.gateway.images.data_url import FileTooLarge, decode_base64, decode_data_url, is_data_url
from mizzen.gateway.images.limits import LOW_DETAIL_PIXELS, ImageLimits, ImagePartError
from mizzen.images.header import read_header
from mizzen.images.types import ImageHeader, ImageRules, InvalidImage, PixelLimits

FetchImage = Callable[["RequestImage"], Awaitable[bytes]]
"""Function that returns the file of an image that is given as a URL."""
URLS_REFUSED = (
    "this gateway fetches no images (--image-urls is refused): send a data: URL with the image in Base64"
)
DETAILS = ("low", "auto", "high")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Source of an image in the body of a request."""

    path: str
    """Path of the part in the body; errors name it."""
    url: str = ""
    """A `data:` or `https:` URL."""
    base64: str | None = None
    """The file in Base64; None if `url` is set."""
    detail: str | None = None
    """`low`, `auto` or `high`."""


@dataclass(slots=True)
class RequestImage:
    """An image of a request."""

    path: str
    detail: str | None = None
    url: str = ""
    """URL from which the file is fetched; empty if the body has the file."""
    content: bytes = b""
    """The file; empty until it is fetched."""
    header: ImageHeader = field(default_factory=lambda: ImageHeader("", 0, 0))
    """Format and size of the file."""

    def use_file(self, content: bytes, limits: ImageLimits) -> None:
        """Set the file of the image.

        Raises:
            ImagePartError: the file is not an image of an accepted format, or has too many pixels.
        """
        try:
            header = read_header(content)
        except InvalidImage as error:
            raise ImagePartError(self.path, str(error)) from None
        pixels = header.width * header.height
        if pixels > limits.pixels:
            reason = f"the image has {header.width} x {header.height} = {pixels} pixels"
            bound = f"at most {limits.pixels} are allowed (--max-image-pixels)"
            raise ImagePartError(self.path, f"{reason}; {bound}", "image_too_large")
        self.content, self.header = content, header

    def pixel_limits(self, rules: ImageRules, requested: PixelLimits | None) -> PixelLimits | None:
        """Return the bounds on pixels after resizing that `detail` and the request's own bounds set."""
        if self.detail != "low" or rules.pixel_bounds is None:
            return requested
        lower, upper = rules.pixel_bounds
        low = None if requested is None else requested.min_pixels
        high = upper if requested is None or requested.max_pixels is None else requested.max_pixels
        return PixelLimits(low, min(high, max(LOW_DETAIL_PIXELS, lower, low or 0)))


class ImageCollector:
    """Reads the images of one request while its body is parsed."""

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._images: list[RequestImage] = []

    def add(self, source: ImageSource) -> None:
        """Read the next image; an image with an https URL is only checked for the form of its URL.

        Raises:
            ImagePartError: the request has too many images, or the image is invalid or too large.
        """
        limits = self._limits
        if len(self._images) >= limits.count:
            reason = f"a request may have at most {limits.count} images (--max-images)"
            raise ImagePartError(source.path, reason, "too_many_images")
        if source.detail not in (None, *DETAILS):
            raise ImagePartError(source.path, f"detail must be {', '.join(DETAILS[:-1])} or {DETAILS[-1]}")
        image = RequestImage(source.path, source.detail)
        try:
            if source.base64 is not None:
                image.use_file(decode_base64(source.base64, limits.size), limits)
            elif is_data_url(source.url):
                image.use_file(decode_data_url(source.url, limits.size), limits)
            else:
                image.url = self._check_url(source)
        except FileTooLarge as error:
            raise ImagePartError(source.path, str(error), "image_too_large") from None
        except ValueError as error:
            raise ImagePartError(source.path, str(error)) from None
        self._images.append(image)

    def finish(self, pixels: PixelLimits | None) -> RequestImages | None:
        """Return the images, with the bounds on pixels that the request sets; None if it has no images."""
        return RequestImages(self._images, self._limits, pixels) if self._images else None

    def _check_url(self, source: ImageSource) -> str:
        """Return the URL of an image that the gateway is to fetch."""
        if source.url[:6].lower() != "https:":
            raise ImagePartError(source.path, "the URL of an image must begin with data: or https:")
        if not self._limits.urls:
            raise ImagePartError(source.path, URLS_REFUSED, "unsupported_content")
        return source.url


class RequestImages:
    """Images of one request, and its bounds on their pixels."""

    def __init__(self, images: list[RequestImage], limits: ImageLimits, pixels: PixelLimits | None) -> None:
        self._images = images
        self._limits = limits
        self.pixels = pixels
        """Bounds on the pixels after resizing that the request sets."""
        self.fetch: FetchImage | None = None
        """Function that fetches images; None while nothing may be fetched."""
        self._loading = asyncio.Lock()

    def __iter__(self) -> Iterator[RequestImage]:
        return iter(self._images)

    def __len__(self) -> int:
        return len(self._images)

    @property
    def size(self) -> int:
        """Size in bytes of all files that are present."""
        return sum(len(image.content) for image in self._images)

    async def load(self) -> None:
        """Fetch the files that are missing, all at once.

        Raises:
            ApiError: an image could not be fetched, or is invalid or too large.
        """
        async with self._loading:
            missing = [image for image in self._images if not image.content]
            if not missing:
                return
            tasks = [asyncio.create_task(self._fetch(image)) for image in missing]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, image: RequestImage) -> None:
        if self.fetch is None:
            raise ImagePartError(image.path, "images with a URL are not fetched here: send a data: URL")
        image.use_file(await self.fetch(image), self._limits)
