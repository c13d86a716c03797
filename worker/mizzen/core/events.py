"""What happens to a scheduler between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.core.request import Request


@dataclass(frozen=True, slots=True)
class Arrive:
    """A request joins the queue."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """A request is to end now; unknown and already ended ones are passed over."""

    rid: int


Event = Arrive | Abort
