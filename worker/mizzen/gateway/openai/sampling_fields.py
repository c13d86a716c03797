"""How tokens are chosen and when an answer ends: from a request's fields to the engine's."""

from __future__ import annotations

import re
from typing import Any

from mizzen.core.sampling_params import MAX_LOGIT_BIAS, PARAMETERS, Grammar, SamplingParams
from mizzen.gateway.errors import invalid
from mizzen.gateway.openai.schemas import Common

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 1024
PLAIN_FIELDS = tuple((entry.name, entry.default) for entry in PARAMETERS if entry.request_field)
"""Fields of requests that set the parameter of the same name, with its default."""


def sampling(
    request: Common,
    max_tokens: int | None,
    *,
    grammar: Grammar | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return how tokens are chosen and when the answer ends.

    Raises:
        ApiError: 400 for a value outside its range.
    """
    if request.seed is not None and not -(2**63) <= request.seed < 2**64:
        raise invalid("seed must be a 64-bit integer", "seed", "out_of_range")
    values = {name: given_or_default(getattr(request, name), default) for name, default in PLAIN_FIELDS}
    greedy = request.top_p == 0  # the smallest set of tokens holds at least the most probable one
    values |= {
        "top_k": 1 if greedy else max(0, request.top_k or 0),
        "top_p": 1.0 if greedy else given_or_default(request.top_p, 1.0),
        "max_tokens": max_tokens,
        "min_tokens": least(request.min_tokens or 0, max_tokens),
        "ignore_eos": bool(request.ignore_eos),
        "stop_token_ids": stop_tokens(request.stop_token_ids or []),
        "stop": stops(request.stop),
        "logit_bias": biases(request.logit_bias or {}),
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "grammar": grammar,
    }
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise invalid(str(error), str(error).partition(" ")[0], "out_of_range") from None


def given_or_default(given: Any, default: Any) -> Any:
    """Return `given`, or the default if it is None or equal to it."""
    return default if given is None or given == default else given


def least(min_tokens: int, max_tokens: int | None) -> int:
    """Return `min_tokens`.

    Raises:
        ApiError: 400 when it is above `max_tokens`.
    """
    if max_tokens is not None and min_tokens > max_tokens:
        text = f"min_tokens must be at most max_tokens ({max_tokens}), not {min_tokens}"
        raise invalid(text, "min_tokens", "out_of_range")
    return min_tokens


def biases(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """Return token ids with what is added to their logits.

    Raises:
        ApiError: 400 for too many, or a key that is no token id.
    """
    if len(given) > MAX_LOGIT_BIAS:
        raise invalid(f"logit_bias holds more than {MAX_LOGIT_BIAS} tokens", "logit_bias", "out_of_range")
    for token in given:
        if not re.fullmatch(r"[0-9]{1,10}", token, re.ASCII) or int(token) >= 2**31:
            text = f"logit_bias: {token[:80]!r} is no token id; keys are token ids written as text"
            raise invalid(text, "logit_bias", "invalid_type")
    return tuple((int(token), bias) for token, bias in given.items())


def stop_tokens(given: list[int]) -> tuple[int, ...]:
    """Return token ids that end an answer.

    Raises:
        ApiError: 400 for too many.
    """
    if len(given) > MAX_STOP_TOKENS:
        raise invalid(f"stop_token_ids holds more than {MAX_STOP_TOKENS} ids", "stop_token_ids")
    return tuple(given)


def stops(given: str | list[str] | None) -> tuple[str, ...]:
    """Return stop strings.

    Raises:
        ApiError: 400 for too many, an empty or a long one.
    """
    found = (given,) if isinstance(given, str) else tuple(given or ())
    if len(found) > MAX_STOPS:
        raise invalid(f"stop holds {len(found)} strings; at most {MAX_STOPS} are allowed", "stop")
    if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in found):
        raise invalid(f"each stop string must have 1 to {MAX_STOP_CHARACTERS} characters", "stop")
    return found
