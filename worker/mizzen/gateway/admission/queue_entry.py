# SPDX-License-Identifier: Apache-2.0
"""Entry of one sequence in the admission queue: tenant, estimated tokens, deadline and siblings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from mizzen.gateway.admission.sibling_sequences import SiblingSequences
from mizzen.gateway.auth.tenant import Tenant, default_tenant

DEFAULT_TENANT = default_tenant()
"""Tenant of requests that did not pass the authentication middleware."""


@dataclass(slots=True, eq=False)
class QueueEntry:
    """Entry of one sequence in the admission queue; the same entry serves all attempts of the sequence."""

    deadline: float
    """Time on the monotonic clock until which the sequence may wait."""
    tenant: Tenant = DEFAULT_TENANT
    priority: int = 0
    expected_tokens: int = 1
    """Tokens of prompt and output, as estimated before tokenization."""
    charges_prompt: bool = True
    """True if this entry is charged for the prompt; true for exactly one sequence of a request."""
    prompt_tokens: int = 0
    """Number of prompt tokens to charge when the entry is settled; 0 until the prompt is tokenized."""
    output_tokens: int = 0
    """Number of output tokens that the client received, to charge when the entry is settled."""
    served: bool = False
    """True if an engine completed a request that generates no tokens, such as an embedding."""
    waited_seconds: float = 0.0
    siblings: SiblingSequences | None = field(default=None, repr=False)
    """State that the request's sequences share; None for a single sequence, or once this one has begun."""
    granted: asyncio.Future[None] | None = field(default=None, repr=False)
    """Future that completes when the entry is admitted, and fails when it is rejected."""
    deadline_timer: asyncio.TimerHandle | None = field(default=None, repr=False)
    """Timer that rejects the entry at its deadline."""
    reserved: bool = field(default=False, repr=False)
    """True while `expected_tokens` are reserved from the tenant's budget, until the entry is settled."""

    @property
    def wait_deadline(self) -> float:
        """Time until which the sequence may wait: `deadline`, or later while its siblings run."""
        return self.deadline if self.siblings is None else max(self.deadline, self.siblings.wait_deadline)

    @property
    def request_started(self) -> bool:
        """True if another sequence of the same request was already admitted."""
        return self.siblings is not None and self.siblings.started

    @property
    def used_tokens(self) -> int:
        """Number of tokens to charge; 0 if no engine produced anything."""
        if not self.output_tokens and not self.served:
            return 0
        return self.output_tokens + (self.prompt_tokens if self.charges_prompt else 0)

    @property
    def weight(self) -> float:
        """Weight in the queue: the tenant's weight, doubled by each step of priority."""
        return self.tenant.weight * 2.0**self.priority


async def reserve_tokens(entries: Sequence[QueueEntry]) -> None:
    """Reserve the tokens that all sequences of one request are expected to use, before any of them begins.

    The tokens come from the tenant's budget. `Admission.leave` settles the sequences that were admitted; for
    all others, the caller must call `Admission.settle`. A sequence that uses more tokens than expected
    continues, and the tenant's next requests have fewer tokens left.

    Raises:
        ApiError: 429 if the budget does not suffice; then nothing is reserved.
    """
    if entries:
        await entries[0].tenant.reserve(sum(queue_entry.expected_tokens for queue_entry in entries))
        for queue_entry in entries:
            queue_entry.reserved = True
