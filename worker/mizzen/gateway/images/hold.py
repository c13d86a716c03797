# SPDX-License-Identifier: Apache-2.0
"""Count the images of a request as bytes in work until the request ends, and let it fetch images."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from starlette.types import Scope

from mizzen.gateway.auth.authentication import get_tenant
from mizzen.gateway.http.request_bodies import BodyBudget
from mizzen.gateway.images.fetch import FetchFailed
from mizzen.gateway.images.limits import ImagePartError
from mizzen.gateway.images.request_images import RequestImage
from mizzen.gateway.requests.generation_request import GenerationRequest

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

log = logging.getLogger(__name__)

NOT_FETCHED, FETCH_CODE = "the image could not be fetched", "image_not_fetched"


@contextmanager
def hold_images(gateway: Gateway, generation: GenerationRequest, scope: Scope) -> Iterator[None]:
    """Count the bytes of a request's images against the limit on all bodies while the block runs.

    Raises:
        ApiError: 429 or 503 if the limit is exceeded (see `BodyBudget.reserve`).
    """
    images = generation.images
    if images is None:
        yield
        return
    tenant = get_tenant(scope)
    owner = "" if tenant is None else tenant.name
    held = HeldBytes(gateway.body_budget, owner)
    fetcher, limit = gateway.image_fetcher, gateway.config.max_image_bytes

    async def fetch(image: RequestImage) -> bytes:
        if fetcher is None:
            raise ImagePartError(image.path, NOT_FETCHED, FETCH_CODE)
        try:
            return await fetcher.fetch(image.url, limit, owner, held.add)
        except FetchFailed as error:
            log.debug("image not fetched", extra={"fields": {"tenant": owner, "reason": str(error)}})
            raise ImagePartError(image.path, NOT_FETCHED, FETCH_CODE) from None

    try:
        held.add(images.size)
        images.fetch = fetch
        yield
    finally:
        images.fetch = None
        held.release()


class HeldBytes:
    """Bytes of one request's images that count against the limit on all bodies."""

    def __init__(self, budget: BodyBudget, owner: str) -> None:
        self._budget = budget
        self._owner = owner
        self._size = 0

    def add(self, size: int) -> None:
        """Count more bytes.

        Raises:
            ApiError: 429 or 503 if the limit is exceeded.
        """
        self._budget.reserve(size, self._owner)
        self._size += size

    def release(self) -> None:
        """Stop counting the bytes."""
        self._budget.release(self._size, self._owner)
        self._size = 0
