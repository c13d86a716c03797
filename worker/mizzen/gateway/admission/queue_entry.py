"""Entry of one sequence in the admission queue: tenant, estimated tokens, deadline and siblings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from mizzen.gateway.admission.sibling_sequences import SiblingSequences
from mizzen.gateway.auth.tenant import Tenant, default_tenant

DEFAULT_TENANT = default_tenant()
"""Tenant of requests outside of the authentication middleware."""


@dataclass(slots=True, eq=False)
class QueueEntry:
    """One sequence's entry in the queue, kept over all attempts."""

    deadline: float
    """Time on the monotonic clock when waiting ends."""
    tenant: Tenant = DEFAULT_TENANT
    priority: int = 0
    expected_tokens: int = 1
    """Estimated tokens of prompt and output, before tokenization."""
    charges_prompt: bool = True
    """True if the tenant is charged for the prompt; true for one sequence of a request."""
    prompt_tokens: int = 0
    """Prompt tokens to charge when the entry is settled, once they are known."""
    output_tokens: int = 0
    """Output tokens that the client received, to charge when the entry is settled."""
    served: bool = False
    """True if an engine completed work that has no output tokens, such as an embedding."""
    waited_seconds: float = 0.0
    siblings: SiblingSequences | None = field(default=None, repr=False)
    """Other sequences of the same request, if any, until this one has begun."""
    granted: asyncio.Future[None] | None = field(default=None, repr=False)
    """Future that completes when the entry is admitted."""
    deadline_timer: asyncio.TimerHandle | None = field(default=None, repr=False)
    """Timer that ends the wait."""
    reserved: bool = field(default=False, repr=False)
    """True if its expected tokens are reserved from the tenant and not settled yet."""

    @property
    def wait_deadline(self) -> float:
        """Time when waiting ends: the deadline, or later because siblings run."""
        return self.deadline if self.siblings is None else max(self.deadline, self.siblings.wait_deadline)

    @property
    def request_started(self) -> bool:
        """True if another sequence of its request was already admitted."""
        return self.siblings is not None and self.siblings.started

    @property
    def used_tokens(self) -> int:
        """Tokens to charge; 0 for a request that no engine did anything for."""
        if not self.output_tokens and not self.served:
            return 0
        return self.output_tokens + (self.prompt_tokens if self.charges_prompt else 0)

    @property
    def weight(self) -> float:
        """Weight in the queue; each step of priority doubles it."""
        return self.tenant.weight * 2.0**self.priority


def reserve_tokens(entries: Sequence[QueueEntry]) -> None:
    """Reserve the tokens that all sequences of one request are expected to use, before any of them begins.

    They come from the tenant's budget. `Admission.leave` settles sequences that were admitted; the others
    need `Admission.settle`. A sequence that uses more tokens than expected goes on, and the tenant's next
    request pays for them.

    Raises:
        ApiError: 429 if the budget does not suffice; then nothing is reserved.
    """
    if entries:
        entries[0].tenant.reserve(sum(queue_entry.expected_tokens for queue_entry in entries))
        for queue_entry in entries:
            queue_entry.reserved = True
