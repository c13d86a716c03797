# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters: the single definition for the API schema, the wire format and the engine.

Each parameter is a field of `SamplingParams`, declared with `parameter()` together with its default, its
bounds and the layers that use it. `mizzen.wire.messages.Sampling` is generated from these fields in order, so
a new field must be last: gateways and engines of other versions then ignore it or use its default.
`mizzen.gateway.openai.schemas` declares the API's field of the same name, and a test compares the two.
"""

from __future__ import annotations

import enum
import json
import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

LARGEST = 2**31 - 1
"""Largest int32: the upper bound of `top_k` and `min_tokens`."""
LEAST_POSITIVE = math.ulp(0.0)
LEAST_REPETITION = 0.01
"""Lower bound of `repetition_penalty`: a much smaller penalty would make logits equal or not finite."""
MAX_LOGPROBS = 20
"""Maximum of `logprobs` and of `prompt_logprobs`: number of most probable tokens to report per position."""
MAX_LOGIT_BIAS = 1024
"""Maximum number of entries of `logit_bias`."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Maximum number of entries of `logprob_token_ids`."""


class GrammarKind(enum.StrEnum):
    """Language in which a grammar is written."""

    JSON_OBJECT = "json_object"
    """Any JSON object; `text` is empty."""
    JSON_SCHEMA = "json_schema"
    """A JSON Schema, draft 2020-12."""
    REGEX = "regex"
    """A regular expression that the whole output must match."""
    EBNF = "ebnf"
    """A grammar in GBNF syntax with a rule `root`."""
    STRUCTURAL_TAG = "structural_tag"
    """xgrammar's JSON description of free text with constrained parts; used for optional tool calls."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """Constraint that the output of a request must match; the engine compiles it."""

    kind: GrammarKind
    """Language of the grammar."""
    text: str = ""
    """The grammar itself, in the language of `kind`."""


def choice_grammar(texts: Iterable[str]) -> Grammar:
    """Return a grammar that allows exactly the given texts, which are not empty."""
    # EBNF has JSON's escapes, but \u takes only four digits there, so characters are left unescaped
    quoted = (json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))
    return Grammar(GrammarKind.EBNF, "root ::= " + " | ".join(quoted))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Inclusive bounds of a number, and their wording in error messages."""

    low: float
    high: float
    wording: str = ""
    """Wording in error messages; empty for "between `low` and `high`"."""

    @property
    def rule(self) -> str:
        """The bounds in the wording of error messages."""
        return self.wording or f"between {self.low} and {self.high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Description of one sampling parameter, for all code that handles parameters generically."""

    name: str
    default: Any
    bounds: Bounds | None
    """Bounds of the value; None if the value is not a number."""
    max_entries: int | None
    """Maximum number of entries if the value is a tuple; None for no limit."""
    request_field: bool
    """Whether a field of the same name in API requests sets the parameter directly."""
    sent: bool
    """Whether the gateway sends the parameter to the engine; otherwise only the gateway uses it."""
    wire_type: Any
    """Type of the parameter's field in `mizzen.wire.messages.Sampling`."""
    slot_option: bool
    """Whether a value other than the default needs `mizzen.core.step_plan.SlotOptions`."""
    profiled: Any
    """Value in the step that measures peak memory; the default if the parameter does not affect memory."""


def parameter(
    default: Any,
    bounds: Bounds | None = None,
    *,
    max_entries: int | None = None,
    request_field: bool = False,
    sent: bool = True,
    wire_type: Any = None,
    slot_option: bool = False,
    profiled: Any = None,
) -> Any:
    """Declare a field of `SamplingParams`; see `Parameter` for the arguments."""
    metadata = {
        "bounds": bounds,
        "max_entries": max_entries,
        "request_field": request_field,
        "sent": sent,
        "wire_type": wire_type,
        "slot_option": slot_option,
        "profiled": default if profiled is None else profiled,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters for sampling and stopping of one request.

    The gateway or the offline `LLM` class matches the strings of `stop`, because only they have the text. The
    engine handles `stop_token_ids`.
    """

    temperature: float = parameter(1.0, Bounds(0, 100), request_field=True, profiled=0.9)
    """Divisor of the logits; 0 always chooses the most probable token (greedy)."""
    top_k: int = parameter(0, Bounds(0, LARGEST, f"between 0 (off) and {LARGEST}"), request_field=True)
    """Number of most probable tokens to sample from; 0 samples from all."""
    top_p: float = parameter(
        1.0, Bounds(LEAST_POSITIVE, 1, "above 0 and at most 1"), request_field=True, profiled=0.9
    )
    """Threshold in (0, 1]. Sampling is limited to the smallest set of most probable tokens whose total
    probability reaches the threshold."""
    min_p: float = parameter(0.0, Bounds(0, 1), request_field=True)
    """Minimum probability of a sampled token, as a fraction (in [0, 1]) of the highest token probability."""
    seed: int | None = parameter(None, Bounds(-(2**63), 2**64 - 1, "a 64-bit integer"), request_field=True)
    """Seed that makes sampling reproducible, regardless of the rest of the batch; None uses a random seed."""
    max_tokens: int | None = parameter(None, Bounds(1, math.inf, "1 or more"))
    """Maximum number of output tokens; None allows output up to the context length."""
    ignore_eos: bool = parameter(False, request_field=True)
    """Whether to continue after an end token of the model; `stop_token_ids` still end the request."""
    stop_token_ids: tuple[int, ...] = parameter((), request_field=True)
    """Ids of tokens that end the request, in addition to the model's end tokens."""
    stop: tuple[str, ...] = parameter((), request_field=True, sent=False)
    """Strings that end the request."""
    frequency_penalty: float = parameter(
        0.0, Bounds(-2, 2), request_field=True, slot_option=True, profiled=1.0
    )
    """Amount, in [-2, 2], subtracted from a token's logit for each occurrence of the token in the output."""
    presence_penalty: float = parameter(0.0, Bounds(-2, 2), request_field=True, slot_option=True)
    """Amount, in [-2, 2], subtracted once from the logit of each token that occurs in the output."""
    repetition_penalty: float = parameter(
        1.0, Bounds(LEAST_REPETITION, 10), request_field=True, slot_option=True, profiled=1.1
    )
    """Penalty, in [0.01, 10], for tokens that occur in the prompt or output: a positive logit is divided by
    the penalty, and a negative logit is multiplied by it."""
    min_tokens: int = parameter(0, Bounds(0, LARGEST), request_field=True, slot_option=True)
    """Minimum number of output tokens: until then, no end token can be sampled."""
    logit_bias: tuple[tuple[int, float], ...] = parameter(
        (), max_entries=MAX_LOGIT_BIAS, request_field=True, slot_option=True, profiled=((0, 1.0),)
    )
    """Pairs of a token id and an amount, in [-100, 100], added to the token's logit; -100 bans the token."""
    logprobs: int | None = parameter(None, Bounds(0, MAX_LOGPROBS), slot_option=True, profiled=MAX_LOGPROBS)
    """Number of most probable tokens whose log probabilities are reported for each output token, in addition
    to that of the output token itself; None reports no log probabilities."""
    prompt_logprobs: int | None = parameter(None, Bounds(0, MAX_LOGPROBS), slot_option=True)
    """Number of most probable tokens whose log probabilities are reported for each prompt token, in addition
    to that of the prompt token itself; None reports no prompt log probabilities. If set, the prompt is
    computed without the prefix cache, except the part before `prompt_logprobs_from`."""
    logprob_token_ids: tuple[int, ...] = parameter((), max_entries=MAX_LOGPROB_TOKEN_IDS)
    """Ids of further tokens whose log probabilities are reported for each output token; needs `logprobs`."""
    grammar: Grammar | None = parameter(  # noqa: RUF009 - declares a field
        None, wire_type=tuple[str, str] | None, slot_option=True
    )
    """Grammar that the output must match; None for free text."""

    prompt_logprobs_from: int = parameter(0, Bounds(0, LARGEST))
    """Index of the first prompt token whose log probabilities are reported; 0 and 1 report all tokens from
    the second one on. Tokens up to the last but one before it may come from the prefix cache. Without
    `prompt_logprobs`, it has no effect."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: a value is out of bounds; the message names the field, its value and the bounds.
        """
        for name, optional, bounds in _BOUNDED:
            value = getattr(self, name)
            if not (optional and value is None) and not bounds.low <= value <= bounds.high:
                raise ValueError(f"{name} must be {bounds.rule}, not {value}")
        for name, most in _LIMITED:
            count = len(getattr(self, name))
            if count > most:
                raise ValueError(f"{name} must be at most {most} tokens, not {count}")
        if self.logprob_token_ids and self.logprobs is None:
            raise ValueError(f"logprob_token_ids must be given with logprobs, not {self.logprob_token_ids}")
        for token, bias in self.logit_bias:
            if not math.isfinite(bias) or not -100 <= bias <= 100:
                raise ValueError(f"logit_bias must be between -100 and 100, not {bias} (token {token})")

    def token_fault(self, vocab_size: int) -> str:
        """Return an error message if a token id is not in the vocabulary of a model, else an empty string."""
        named = (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", (token for token, _ in self.logit_bias)),
            ("logprob_token_ids", self.logprob_token_ids),
        )
        for name, tokens in named:
            for token in tokens:
                if not 0 <= token < vocab_size:
                    return f"{name} holds {token}; token ids go from 0 to {vocab_size - 1}"
        return ""


def _parameters() -> tuple[Parameter, ...]:
    hints = typing.get_type_hints(SamplingParams)
    parameters = []
    for declared in fields(SamplingParams):
        metadata = dict(declared.metadata)
        metadata["wire_type"] = metadata["wire_type"] or hints[declared.name]
        parameters.append(Parameter(name=declared.name, default=declared.default, **metadata))
    return tuple(parameters)


PARAMETERS = _parameters()
"""All sampling parameters, in the order of their declaration."""
_BOUNDED = tuple((entry.name, entry.default is None, entry.bounds) for entry in PARAMETERS if entry.bounds)
_LIMITED = tuple((entry.name, entry.max_entries) for entry in PARAMETERS if entry.max_entries is not None)
_SENT = tuple(entry.name for entry in PARAMETERS if entry.sent)


def sent_values(source: object) -> dict[str, Any]:
    """Return the parameters that the engine needs, by name.

    Args:
        source: a `SamplingParams` or `mizzen.wire.messages.Sampling`.
    """
    return {name: getattr(source, name) for name in _SENT}
