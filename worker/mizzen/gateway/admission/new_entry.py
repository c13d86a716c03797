"""Makes the queue entry of a request: its tenant, priority, estimated tokens and deadline."""

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
"""Assumed characters per token of text that is not tokenized yet; most tokens are a little longer."""


def new_queue_entry(
    scope: Scope, generation: GenerationRequest, deadline: float, *, first: bool = True, max_tokens: int = 0
) -> QueueEntry:
    """Return the queue entry of one sequence of a request; only the `first` is charged for the prompt.

    `max_tokens` is the longest context of the service, if known. A larger request is refused after
    tokenization; until then it must not delay others for tokens that it will not get.

    Raises:
        ApiError: 400 or 403 for a priority that the tenant may not use.
    """
    tenant = get_tenant(scope) or DEFAULT_TENANT
    expected = estimate_tokens(generation, prompt=first)
    return QueueEntry(
        deadline,
        tenant=tenant,
        priority=tenant.priority(generation.priority),
        expected_tokens=min(expected, max_tokens) if max_tokens else expected,
        charges_prompt=first,
    )


def estimate_tokens(generation: GenerationRequest, *, prompt: bool = True) -> int:
    """Estimate the tokens that a sequence will need, before anything is tokenized."""
    output = generation.sampling.max_tokens or EXPECTED_OUTPUT_TOKENS
    return (estimate_prompt_tokens(generation) if prompt else 0) + output


def estimate_prompt_tokens(generation: GenerationRequest) -> int:
    """Estimate the tokens of a prompt."""
    if generation.messages is not None:
        return sum(map(estimate_text_tokens, generation.messages)) + 4 * len(generation.messages)
    return estimate_text_tokens(generation.prompt)


def estimate_text_tokens(value: Any) -> int:
    """Estimate the tokens of a part of a body: texts by length, token ids by number."""
    if isinstance(value, str):
        return math.ceil(len(value) / CHARACTERS_PER_TOKEN)
    if isinstance(value, dict):
        return sum(map(estimate_text_tokens, value.values()))
    if isinstance(value, array):
        return len(value)
    if isinstance(value, (list, tuple)):
        return sum(map(estimate_text_tokens, value))
    return 0
