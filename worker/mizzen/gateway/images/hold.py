# SPDX-License-Identifier: Apache-2.0
"""Count the images of a request as bytes in work until the request ends, and let it fetch images."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from starlette.types import Scope

from mizzen.gateway.auth.authentication import get_tenant_name
from mizzen.gateway.http.request_bodies import HeldBytes
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
    owner = get_tenant_name(scope)
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
        for image in images:
            gateway.metrics.images.labels("https" if image.url else "data").inc()
        images.fetch = fetch
        yield
    finally:
        images.fetch = None
        held.release()
