"""Events that a scheduler receives between two steps."""

from __future__ import annotations

from msgspec import Struct

from mizzen.core.request import Request


class Arrive(Struct, frozen=True):
    """Add a request to the queue."""

    request: Request


class Abort(Struct, frozen=True):
    """Abort a request; unknown and finished ones are ignored."""

    rid: int


Event = Arrive | Abort
