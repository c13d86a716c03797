"""How tokens of one request are chosen and when it ends."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

LARGEST = 2**31 - 1
"""Of whole numbers that reach the device."""
LEAST_REPETITION = 0.01
"""Of `repetition_penalty`: logits divided by much less have no difference left, or no number."""
MAX_LOGPROBS = 20
"""Most probable tokens reported beside each token, at most."""
MAX_LOGIT_BIAS = 1024
"""Entries of `logit_bias`."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Entries of `logprob_token_ids`."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request.

    `stop` holds strings; whoever holds text acts on them (the gateway, the offline class). The engine sees
    `stop_token_ids` only.
    """

    temperature: float = 1.0
    """0 chooses the most probable token (greedy)."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set whose probability reaches top_p, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less probable than min_p times the most probable, in [0, 1]."""
    seed: int | None = None
    """Makes the tokens reproducible, alone or in a batch; None draws one."""
    max_tokens: int | None = None
    """Output tokens at most; None means up to the context length."""
    ignore_eos: bool = False
    """Go on after the model's own end tokens; `stop_token_ids` still end the request."""
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    frequency_penalty: float = 0.0
    """Subtracted from a logit for each time that the output holds the token, in [-2, 2]."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the output holds, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that prompt or output hold, in [0.01, 10]."""
    min_tokens: int = 0
    """End tokens cannot be drawn before the output has so many tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their logits, in [-100, 100]; -100 and below ban the token."""
    logprobs: int | None = None
    """Report each output token's log probability, and those of so many most probable ones."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, which is then run without the prefix cache."""
    logprob_token_ids: tuple[int, ...] = ()
    """Report these tokens' log probabilities beside each output token too (with `logprobs`)."""
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        """Reject values outside their range.

        Raises:
            ValueError: names the field, its value and the range.
        """
        checks = (
            ("temperature", self.temperature, 0 <= self.temperature <= 100, "between 0 and 100"),
            ("top_k", self.top_k, 0 <= self.top_k <= LARGEST, f"between 0 (off) and {LARGEST}"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1"),
            ("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "1 or more"),
            ("seed", self.seed, self.seed is None or -(2**63) <= self.seed < 2**64, "a 64-bit integer"),
            (
                "frequency_penalty",
                self.frequency_penalty,
                -2 <= self.frequency_penalty <= 2,
                "between -2 and 2",
            ),
            ("presence_penalty", self.presence_penalty, -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                LEAST_REPETITION <= self.repetition_penalty <= 10,
                f"between {LEAST_REPETITION} and 10",
            ),
            ("min_tokens", self.min_tokens, 0 <= self.min_tokens <= LARGEST, f"between 0 and {LARGEST}"),
            ("logprobs", self.logprobs, _logprobs(self.logprobs), f"between 0 and {MAX_LOGPROBS}"),
            (
                "prompt_logprobs",
                self.prompt_logprobs,
                _logprobs(self.prompt_logprobs),
                f"between 0 and {MAX_LOGPROBS}",
            ),
            (
                "logit_bias",
                len(self.logit_bias),
                len(self.logit_bias) <= MAX_LOGIT_BIAS,
                f"at most {MAX_LOGIT_BIAS} tokens",
            ),
            (
                "logprob_token_ids",
                len(self.logprob_token_ids),
                len(self.logprob_token_ids) <= MAX_LOGPROB_TOKEN_IDS,
                f"at most {MAX_LOGPROB_TOKEN_IDS} tokens",
            ),
            (
                "logprob_token_ids",
                self.logprob_token_ids,
                not self.logprob_token_ids or self.logprobs is not None,
                "given with logprobs",
            ),
        )
        for name, value, good, rule in checks:
            if not good:
                raise ValueError(f"{name} must be {rule}, not {value}")
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


def _logprobs(given: int | None) -> bool:
    return given is None or 0 <= given <= MAX_LOGPROBS
