"""What a sequence of a request has while it waits for its turn: whose it is, how much it needs, how long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from mizzen.gateway.admission.sibling_sequences import SiblingSequences
from mizzen.gateway.auth.tenant import Tenant, default_tenant

DEFAULT_TENANT = default_tenant()
"""Whose a request is that nobody has asked about."""


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A place in the queue, kept over all attempts of a request."""

    deadline: float
    """Seconds of the monotonic clock; waiting ends then."""
    tenant: Tenant = DEFAULT_TENANT
    priority: int = 0
    expected_tokens: int = 1
    """Of prompt and answer, as far as can be said before tokenizing."""
    charges_prompt: bool = True
    """Whether its tenant is charged for the prompt: one ticket of a request is."""
    prompt_tokens: int = 0
    """Set once they are known; charged when the ticket ends,"""
    output_tokens: int = 0
    """with what the client got of the engine."""
    served: bool = False
    """Whether an engine has done its work without giving a token, as for an embedding."""
    waited_seconds: float = 0.0
    siblings: SiblingSequences | None = field(default=None, repr=False)
    """The other sequences of its request, where there are any, until it has begun."""
    granted: asyncio.Future[None] | None = field(default=None, repr=False)
    deadline_timer: asyncio.TimerHandle | None = field(default=None, repr=False)
    """Ends its wait."""
    reserved: bool = field(default=False, repr=False)
    """Whether its tenant's tokens are taken, until it is settled."""

    @property
    def wait_deadline(self) -> float:
        """When waiting ends: the deadline, or later because siblings run."""
        return self.deadline if self.siblings is None else max(self.deadline, self.siblings.wait_deadline)

    @property
    def request_started(self) -> bool:
        """Whether its request has begun with another sequence."""
        return self.siblings is not None and self.siblings.started

    @property
    def used_tokens(self) -> int:
        """What is charged: nothing for a request that no engine did anything for."""
        if not self.output_tokens and not self.served:
            return 0
        return self.output_tokens + (self.prompt_tokens if self.charges_prompt else 0)

    @property
    def weight(self) -> float:
        """Its weight in the queue: each step of priority doubles it."""
        return self.tenant.weight * 2.0**self.priority


def reserve_tokens(entries: Sequence[QueueEntry]) -> None:
    """Take from a tenant what all sequences of one request are expected to use, before one of them begins.

    `Admission.leave` settles those that were let in, `Admission.settle` all others: what one of them uses
    beyond that is a debt of the next request, and ends none of this one's.

    Raises:
        ApiError: 429; then nothing is taken.
    """
    if entries:
        entries[0].tenant.reserve(sum(queue_entry.expected_tokens for queue_entry in entries))
        for queue_entry in entries:
            queue_entry.reserved = True
