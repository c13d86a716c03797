# SPDX-License-Identifier: Apache-2.0
"""Creates the queue entry of a sequence: its tenant, priority, estimated tokens and deadline."""

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
"""Assumed number of characters per token in untokenized text; the actual mean is a little higher."""


def new_queue_entry(
    scope: Scope, generation: GenerationRequest, deadline: float, *, first: bool = True, max_tokens: int = 0
) -> QueueEntry:
    """Return the queue entry of one sequence of a request.

    Args:
        scope: ASGI scope of the request.
        generation: the sequence's request.
        deadline: time on the monotonic clock until which the sequence may wait.
        first: whether this is the request's first sequence, to which the prompt tokens are charged.
        max_tokens: longest context of the service in tokens, 0 if unknown. It limits the estimate, so that a
            request that tokenization will find too long does not delay others.

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
    """Estimate a sequence's tokens before tokenization: its output and, if `prompt` is true, its prompt."""
    output = generation.sampling.max_tokens or EXPECTED_OUTPUT_TOKENS
    return (estimate_prompt_tokens(generation) if prompt else 0) + output


def estimate_prompt_tokens(generation: GenerationRequest) -> int:
    """Estimate the number of tokens in a request's prompt or messages."""
    if generation.messages is not None:
        return sum(map(estimate_text_tokens, generation.messages)) + 4 * len(generation.messages)
    return estimate_text_tokens(generation.prompt)


def estimate_text_tokens(value: Any) -> int:
    """Estimate the number of tokens in a JSON value: text by its length, each token id as one token."""
    if isinstance(value, str):
        return math.ceil(len(value) / CHARACTERS_PER_TOKEN)
    if isinstance(value, dict):
        return sum(map(estimate_text_tokens, value.values()))
    if isinstance(value, array):
        return len(value)
    if isinstance(value, (list, tuple)):
        return sum(map(estimate_text_tokens, value))
    return 0
