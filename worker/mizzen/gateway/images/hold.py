# SPDX-License-Identifier: Apache-2.0
"""Count the images of a request as bytes in work until the request ends, and let it fetch images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from starlette.types import Scope

from mizzen.gateway.auth.authentication import get_tenant
from mizzen.gateway.requests.generation_request import GenerationRequest

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway


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
    size = images.size
    gateway.body_budget.reserve(size, owner)
    try:
        yield
    finally:
        gateway.body_budget.release(size, owner)
