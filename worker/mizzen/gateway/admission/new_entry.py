"""From a request to its place in the queue: whose it is, how urgent, how much, and until when."""

from __future__ import annotations

import math
from array import array
from typing import Any

from starlette.types import Scope

from mizzen.gateway.admission.queue_entry import DEFAULT_TENANT, QueueEntry
from mizzen.gateway.auth.authentication import get_tenant
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.routing.interfaces import EXPECTED_OUTPUT_TOKENS

CHARACTERS_PER_TOKEN = 4
"""Of a text that is not tokenized yet; most are a little longer."""


def new_queue_entry(
    scope: Scope, generation: GenerationRequest, deadline: float, *, first: bool = True, most_tokens: int = 0
) -> QueueEntry:
    """Return the ticket of one sequence of a request; only the `first` is charged for the prompt.

    `most_tokens` is what a context holds, where that is known: what asks for more is refused once it is
    tokenized, and until then holds up nobody for the sake of tokens that it will not get.

    Raises:
        ApiError: 400 or 403 for a priority that it may not have.
    """
    tenant = get_tenant(scope) or DEFAULT_TENANT
    expected = estimate_tokens(generation, prompt=first)
    return QueueEntry(
        deadline,
        tenant=tenant,
        priority=tenant.priority(generation.priority),
        expected_tokens=min(expected, most_tokens) if most_tokens else expected,
        charges_prompt=first,
    )


def estimate_tokens(generation: GenerationRequest, *, prompt: bool = True) -> int:
    """Return about how many tokens a sequence will need, before anything is tokenized."""
    answer = generation.sampling.max_tokens or EXPECTED_OUTPUT_TOKENS
    return (estimate_prompt_tokens(generation) if prompt else 0) + answer


def estimate_prompt_tokens(generation: GenerationRequest) -> int:
    """Return about how many tokens a prompt has."""
    if generation.messages is not None:
        return sum(map(estimate_text_tokens, generation.messages)) + 4 * len(generation.messages)
    return estimate_text_tokens(generation.prompt)


def estimate_text_tokens(value: Any) -> int:
    """Return about how many tokens a part of a body has: texts by length, token ids by number."""
    if isinstance(value, str):
        return math.ceil(len(value) / CHARACTERS_PER_TOKEN)
    if isinstance(value, dict):
        return sum(map(estimate_text_tokens, value.values()))
    if isinstance(value, array):
        return len(value)
    if isinstance(value, (list, tuple)):
        return sum(map(estimate_text_tokens, value))
    return 0
