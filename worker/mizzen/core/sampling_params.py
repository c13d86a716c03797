"""Sampling parameters: the one definition that the API's schema, the wire and the engine are derived from.

A parameter is a field of `SamplingParams` declared with `parameter()`, which holds its default, its bounds
and which layers use it. `mizzen.wire.messages.Sampling` is generated from these fields in their order, so a
new one must come last: gateways and engines of other versions then ignore it or use its default.
`mizzen.gateway.openai.schemas` declares the API's field of the same name, and a test compares the two.
"""

from __future__ import annotations

import enum
import math
import typing
from dataclasses import dataclass, field, fields
from typing import Any

LARGEST = 2**31 - 1
"""Largest integer that reaches the device (int32)."""
LEAST_POSITIVE = math.ulp(0.0)
LEAST_REPETITION = 0.01
"""Lower bound of `repetition_penalty`: dividing logits by much less makes them equal or not finite."""
MAX_LOGPROBS = 20
"""Maximum number of most probable tokens reported for each token."""
MAX_LOGIT_BIAS = 1024
"""Maximum number of entries of `logit_bias`."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Maximum number of entries of `logprob_token_ids`."""


class GrammarKind(enum.StrEnum):
    """How a grammar is written."""

    JSON_OBJECT = "json_object"
    """Any JSON object; `text` is empty."""
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"
    """xgrammar's JSON description of free text with constrained parts: tool calls that a model may make."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must conform to; the engine compiles it."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Inclusive bounds of a number, and their wording in errors."""

    low: float
    high: float
    wording: str = ""
    """Replaces "between `low` and `high`"."""

    @property
    def rule(self) -> str:
        """The bounds as error messages state them."""
        return self.wording or f"between {self.low} and {self.high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One sampling parameter, as every layer but the declaration itself sees it."""

    name: str
    default: Any
    bounds: Bounds | None
    """Bounds of the number; None for parameters that are not one number."""
    max_entries: int | None
    """Maximum length of a tuple."""
    request_field: bool
    """Whether the API's requests have a field of this name that sets it directly."""
    sent: bool
    """Whether the engine needs it. The gateway alone acts on the others."""
    wire_type: Any
    """Type of its element in `mizzen.wire.messages.Sampling`."""
    slot_option: bool
    """Whether a value other than the default needs per-slot state beyond temperature and filters."""
    profiled: Any
    """Value in the step that measures peak memory; the default where the value makes no difference."""


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
    """Declare a field of `SamplingParams`; the arguments are described at `Parameter`."""
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
    """Sampling and stopping of one request.

    `stop` holds strings, which are matched where the text is: by the gateway or the offline class. The engine
    gets `stop_token_ids` only.
    """

    temperature: float = parameter(1.0, Bounds(0, 100), request_field=True, profiled=0.9)
    """Divisor of the logits; 0 chooses the most probable token (greedy)."""
    top_k: int = parameter(0, Bounds(0, LARGEST, f"between 0 (off) and {LARGEST}"), request_field=True)
    """Number of most probable tokens to sample from; 0 keeps all."""
    top_p: float = parameter(
        1.0, Bounds(LEAST_POSITIVE, 1, "above 0 and at most 1"), request_field=True, profiled=0.9
    )
    """Probability that the smallest set of tokens to sample from must reach, in (0, 1]."""
    min_p: float = parameter(0.0, Bounds(0, 1), request_field=True)
    """Least probability of a token relative to the most probable one, in [0, 1]."""
    seed: int | None = parameter(None, Bounds(-(2**63), 2**64 - 1, "a 64-bit integer"), request_field=True)
    """Seed that makes the tokens reproducible, alone or in a batch; None draws one."""
    max_tokens: int | None = parameter(None, Bounds(1, math.inf, "1 or more"))
    """Maximum number of output tokens; None means up to the context length."""
    ignore_eos: bool = parameter(False, request_field=True)
    """Whether to continue after the model's own end tokens. `stop_token_ids` still end the request."""
    stop_token_ids: tuple[int, ...] = parameter((), request_field=True)
    """Tokens that end the request."""
    stop: tuple[str, ...] = parameter((), request_field=True, sent=False)
    """Strings that end the request."""
    frequency_penalty: float = parameter(
        0.0, Bounds(-2, 2), request_field=True, slot_option=True, profiled=1.0
    )
    """Amount subtracted from a token's logit for each of its occurrences in the output, in [-2, 2]."""
    presence_penalty: float = parameter(0.0, Bounds(-2, 2), request_field=True, slot_option=True)
    """Amount subtracted from the logits of tokens that occur in the output, in [-2, 2]."""
    repetition_penalty: float = parameter(
        1.0, Bounds(LEAST_REPETITION, 10), request_field=True, slot_option=True, profiled=1.1
    )
    """Divisor of positive and factor of negative logits of tokens in prompt or output, in [0.01, 10]."""
    min_tokens: int = parameter(0, Bounds(0, LARGEST), request_field=True, slot_option=True)
    """Number of output tokens before which end tokens cannot be sampled."""
    logit_bias: tuple[tuple[int, float], ...] = parameter(
        (), max_entries=MAX_LOGIT_BIAS, request_field=True, slot_option=True, profiled=((0, 1.0),)
    )
    """Token ids and the amounts added to their logits, in [-100, 100]; -100 bans the token."""
    logprobs: int | None = parameter(None, Bounds(0, MAX_LOGPROBS), slot_option=True, profiled=MAX_LOGPROBS)
    """Number of most probable tokens to report beside each output token's own log probability."""
    prompt_logprobs: int | None = parameter(None, Bounds(0, MAX_LOGPROBS), slot_option=True)
    """The same number for the prompt's tokens, which are then run without the prefix cache."""
    logprob_token_ids: tuple[int, ...] = parameter((), max_entries=MAX_LOGPROB_TOKEN_IDS)
    """Tokens whose log probabilities are reported for each output token too; needs `logprobs`."""
    grammar: Grammar | None = parameter(  # noqa: RUF009 - declares a field
        None, wire_type=tuple[str, str] | None, slot_option=True
    )
    """Grammar that the output must match."""

    def __post_init__(self) -> None:
        """Reject values outside their bounds.

        Raises:
            ValueError: names the field, its value and the bounds.
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
        """Return which field names a token that a model does not have; empty when none does."""
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
    """Return the parameters that the engine needs, by name, of `SamplingParams` or its form on the wire."""
    return {name: getattr(source, name) for name in _SENT}
