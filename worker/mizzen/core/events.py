"""What happens to a scheduler between two steps."""

from __future__ import annotations

from msgspec import Struct

from mizzen.core.request import Request


class Arrive(Struct, frozen=True):
    """A request joins the queue."""

    request: Request


class Abort(Struct, frozen=True):
    """A request is to end now; unknown and already ended ones are passed over."""

    rid: int


Event = Arrive | Abort
