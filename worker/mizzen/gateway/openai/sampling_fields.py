# SPDX-License-Identifier: Apache-2.0
"""Convert the sampling and stop fields of a request to `SamplingParams`, and back."""

from __future__ import annotations

import re
from typing import Any

from mizzen.core.sampling_params import MAX_LOGIT_BIAS, PARAMETERS, Grammar, GrammarKind, SamplingParams
from mizzen.gateway.errors import invalid
from mizzen.gateway.openai.schemas import CommonFields

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 1024
SAME_NAME_FIELDS = tuple((entry.name, entry.default) for entry in PARAMETERS if entry.request_field)
"""Name and default value of each sampling parameter that is set by a request field of the same name."""
GRAMMAR_FIELDS = {GrammarKind.JSON_SCHEMA: "json", GrammarKind.EBNF: "grammar"}
"""Fields of `structured_outputs` that are not named like the kind of their grammar."""


def sampling_params(
    request: CommonFields,
    max_tokens: int | None,
    *,
    grammar: Grammar | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    prompt_logprobs_from: int = 0,
) -> SamplingParams:
    """Return the sampling parameters of a request.

    Args:
        request: The decoded body.
        max_tokens: Maximum number of output tokens; None if the request does not limit it.
        grammar: Grammar that constrains the output.
        logprobs: For each output token, the number of most probable tokens to return; None for no log
            probabilities.
        prompt_logprobs: The same for each prompt token.
        prompt_logprobs_from: Index of the first prompt token with log probabilities.

    Raises:
        ApiError: 400 for a value out of range.
    """
    if request.seed is not None and not -(2**63) <= request.seed < 2**64:
        raise invalid("seed must be a 64-bit integer", "seed", "out_of_range")
    values = {name: value_or_default(getattr(request, name), default) for name, default in SAME_NAME_FIELDS}
    greedy = request.top_p == 0  # the smallest set contains at least the most probable token
    values |= {
        "top_k": 1 if greedy else max(0, request.top_k or 0),
        "top_p": 1.0 if greedy else value_or_default(request.top_p, 1.0),
        "max_tokens": max_tokens,
        "min_tokens": check_min_tokens(request.min_tokens or 0, max_tokens),
        "ignore_eos": bool(request.ignore_eos),
        "stop_token_ids": parse_stop_token_ids(request.stop_token_ids or []),
        "stop": parse_stop_strings(request.stop),
        "logit_bias": parse_logit_bias(request.logit_bias or {}),
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "prompt_logprobs_from": prompt_logprobs_from,
        "grammar": grammar,
    }
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise invalid(str(error), str(error).partition(" ")[0], "out_of_range") from None


def completion_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a request to `/v1/completions` for parameters that differ from their defaults.

    Log probabilities are left out.
    """
    defaults = {"max_tokens": None, **dict(SAME_NAME_FIELDS)}
    fields = {name: getattr(params, name) for name in defaults if getattr(params, name) != defaults[name]}
    if params.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    if (grammar := params.grammar) is not None:
        text = grammar.kind is GrammarKind.JSON_OBJECT or grammar.text
        fields["structured_outputs"] = {GRAMMAR_FIELDS.get(grammar.kind, grammar.kind): text}
    return fields


def value_or_default(value: Any, default: Any) -> Any:
    """Return `value`; if it is None or equals `default`, return `default` (such as 1.0 instead of 1)."""
    return default if value is None or value == default else value


def check_min_tokens(min_tokens: int, max_tokens: int | None) -> int:
    """Return `min_tokens` after checking it.

    Raises:
        ApiError: 400 if it exceeds `max_tokens`.
    """
    if max_tokens is not None and min_tokens > max_tokens:
        text = f"min_tokens must be at most max_tokens ({max_tokens}), not {min_tokens}"
        raise invalid(text, "min_tokens", "out_of_range")
    return min_tokens


def parse_logit_bias(logit_bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """Return `logit_bias` as pairs of a token id and the value to add to its logit.

    Raises:
        ApiError: 400 if there are too many pairs, or a key is not a token id.
    """
    if len(logit_bias) > MAX_LOGIT_BIAS:
        raise invalid(f"logit_bias holds more than {MAX_LOGIT_BIAS} tokens", "logit_bias", "out_of_range")
    for token in logit_bias:
        if not re.fullmatch(r"[0-9]{1,10}", token, re.ASCII) or int(token) >= 2**31:
            text = f"logit_bias: {token[:80]!r} is not a token id; keys are token ids written as text"
            raise invalid(text, "logit_bias", "invalid_type")
    return tuple((int(token), bias) for token, bias in logit_bias.items())


def parse_stop_token_ids(token_ids: list[int]) -> tuple[int, ...]:
    """Return the token ids that end the output.

    Raises:
        ApiError: 400 if there are too many ids.
    """
    if len(token_ids) > MAX_STOP_TOKENS:
        raise invalid(f"stop_token_ids holds more than {MAX_STOP_TOKENS} ids", "stop_token_ids")
    return tuple(token_ids)


def parse_stop_strings(stop_field: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop strings.

    Raises:
        ApiError: 400 if there are too many strings, or a string is empty or too long.
    """
    strings = (stop_field,) if isinstance(stop_field, str) else tuple(stop_field or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid(f"stop holds {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop")
    if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in strings):
        raise invalid(f"each stop string must have 1 to {MAX_STOP_CHARACTERS} characters", "stop")
    return strings
