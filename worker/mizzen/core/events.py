# SPDX-License-Identifier: Apache-2.0
"""Events that a scheduler receives between two steps."""

from __future__ import annotations

from msgspec import Struct

from mizzen.core.images.types import Pixels
from mizzen.core.request import Request


class AddRequest(Struct, frozen=True):
    """Add a request to the queue."""

    request: Request


class AbortRequest(Struct, frozen=True):
    """Abort a request; ignored if the request is unknown or has finished."""

    rid: int


class ProvideImage(Struct, frozen=True):
    """Provide the pixels of an image that `Scheduler.drain_missing_images` named; ignored if not needed."""

    digest: bytes
    pixels: Pixels


Event = AddRequest | AbortRequest | ProvideImage
