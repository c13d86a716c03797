"""From a request to its place in the queue: whose it is, how urgent, how much, and until when."""

from __future__ import annotations

import math
from array import array
from typing import Any

from starlette.types import Scope

from mizzen.gateway.admission.admission import NOBODY, Ticket
from mizzen.gateway.auth.authentication import tenant_of
from mizzen.gateway.requests.generation_request import Wish
from mizzen.gateway.routing.interfaces import EXPECTED_OUTPUT_TOKENS

CHARACTERS_A_TOKEN = 4
"""Of a text that is not tokenized yet; most are a little longer."""


def new_ticket(
    scope: Scope, wish: Wish, deadline: float, *, first: bool = True, most_tokens: int = 0
) -> Ticket:
    """Return the ticket of one sequence of a request; only the `first` is charged for the prompt.

    `most_tokens` is what a context holds, where that is known: what asks for more is refused once it is
    tokenized, and until then holds up nobody for the sake of tokens that it will not get.

    Raises:
        ApiError: 400 or 403 for a priority that it may not have.
    """
    tenant = tenant_of(scope) or NOBODY
    expected = expected_tokens(wish, prompt=first)
    return Ticket(
        deadline,
        tenant=tenant,
        priority=tenant.priority(wish.priority),
        expected_tokens=min(expected, most_tokens) if most_tokens else expected,
        charges_prompt=first,
    )


def expected_tokens(wish: Wish, *, prompt: bool = True) -> int:
    """Return about how many tokens a sequence will need, before anything is tokenized."""
    answer = wish.sampling.max_tokens or EXPECTED_OUTPUT_TOKENS
    return (prompt_tokens(wish) if prompt else 0) + answer


def prompt_tokens(wish: Wish) -> int:
    """Return about how many tokens a prompt has."""
    if wish.messages is not None:
        return sum(map(text_tokens, wish.messages)) + 4 * len(wish.messages)
    return text_tokens(wish.prompt)


def text_tokens(value: Any) -> int:
    """Return about how many tokens a part of a body has: texts by length, token ids by number."""
    if isinstance(value, str):
        return math.ceil(len(value) / CHARACTERS_A_TOKEN)
    if isinstance(value, dict):
        return sum(map(text_tokens, value.values()))
    if isinstance(value, array):
        return len(value)
    if isinstance(value, (list, tuple)):
        return sum(map(text_tokens, value))
    return 0
