"""What a request asks for, whatever its endpoint."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from mizzen.core.sampling_params import SamplingParams
from mizzen.gateway.requests.output import OutputForm

MAX_SEQUENCES = 1024
"""Prompts times `best_of` of one request."""
SEED_STEP = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: odd, so that no two choices of a request get one seed."""

Prompt: TypeAlias = "str | array[int]"
"""Text, or token ids as an array of int32: a request that waits holds little more than its body had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a request asks for; `sequences` splits it into what engines run one by one."""

    model: str
    sampling: SamplingParams
    max_tokens_given: bool = False
    """Whether `sampling.max_tokens` is the client's: the context must then have room for it."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """Whether each event of the stream holds the usage so far."""
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    """Whether log probabilities name tokens by their ids."""
    skip_special_tokens: bool = True

    messages: tuple[dict[str, Any], ...] | None = None
    """A conversation, or None with `prompt`."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template (`chat_template_kwargs`)."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    output_form: OutputForm | None = None
    """Tools and reasoning; None gives all text as content."""

    grammar_field: str = "tools"
    """The body's field that constrains the answer's form, for errors."""
    prompt_field: str = "prompt"
    """The body's field that the prompt comes from, for errors."""

    prompt: Prompt | None = None
    """Text or token ids; the first of `prompts`."""
    prompts: tuple[Prompt, ...] = ()
    """All prompts of a completion."""
    add_special_tokens: bool = True
    """Whether the tokenizer's own special tokens (a BOS, say) go around a text prompt."""
    echo: bool = False
    """Whether the answer begins with its prompt."""
    prompt_only: bool = False
    """Whether nothing is generated: of the one token that an engine gives at least, nobody is told."""

    session: str = ""
    """What the body says of requests that belong together: `prompt_cache_key`, or `user`; a digest of a long
    one."""
    priority: int | None = None
    """Asked for; None is that of the API key."""
    timeout_seconds: float | None = None
    """From its arrival to its last byte."""

    n: int = 1
    """Choices of each prompt."""
    best_of: int = 1
    """Sequences of each prompt, the `n` most probable of which become choices; at least `n`."""

    @property
    def logprobs(self) -> bool:
        """Whether log probabilities are asked for."""
        return self.sampling.logprobs is not None

    def split_sequences(self) -> list[GenerationRequest]:
        """Return one wish a sequence: those of a prompt one after another, each with a seed of its own.

        The first of each prompt has the request's seed, so that it answers as it would alone.
        """
        if self.best_of == 1 and len(self.prompts) <= 1:
            return [self]
        sampling = self.sampling
        if self.best_of > self.n and sampling.logprobs is None:  # the best are found by them
            sampling = replace(sampling, logprobs=0)
        found: list[GenerationRequest] = []
        for prompt in self.prompts or (self.prompt,):
            found += [
                replace(self, prompt=prompt, prompts=(), sampling=with_seed_of(sampling, index))
                for index in range(self.best_of)
            ]
        return found


def with_seed_of(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the sampling of a prompt's sequence; a request without a seed gives none to its sequences.

    The first alone reports on the prompt: that runs it without the prefix cache.
    """
    if index == 0:
        return sampling
    seed = None if sampling.seed is None else (sampling.seed + index * SEED_STEP) % 2**64
    return replace(sampling, seed=seed, prompt_logprobs=None)
