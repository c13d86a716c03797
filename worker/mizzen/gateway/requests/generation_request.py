"""A request for generation, independent of its endpoint."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from mizzen.core.sampling_params import SamplingParams
from mizzen.gateway.requests.output import OutputForm

MAX_SEQUENCES = 1024
"""Largest number of sequences of one request: prompts times `best_of`."""
SEED_STEP = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio; odd, so that all sequences of a request get different seeds."""

Prompt: TypeAlias = "str | array[int]"
"""Text, or token ids as an int32 array: a waiting request takes little more memory than its body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Everything that a request asks for; `split_sequences` splits it into the sequences that engines run."""

    model: str
    sampling: SamplingParams
    max_tokens_given: bool = False
    """True if the client set `sampling.max_tokens`; the context must then have room for it."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """True if each event of the stream reports the usage so far."""
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    """True if log probabilities name tokens by their ids."""
    skip_special_tokens: bool = True

    messages: tuple[dict[str, Any], ...] | None = None
    """Conversation; None if there is a `prompt`."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template (`chat_template_kwargs`)."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    output_form: OutputForm | None = None
    """Tools and reasoning; None returns all text as content."""

    grammar_field: str = "tools"
    """Field of the body that constrains the form of the answer, for errors."""
    prompt_field: str = "prompt"
    """Field of the body that holds the prompt, for errors."""

    prompt: Prompt | None = None
    """Text or token ids; the first of `prompts`."""
    prompts: tuple[Prompt, ...] = ()
    """All prompts of a completion."""
    add_special_tokens: bool = True
    """True if the tokenizer adds its own special tokens, such as a BOS, to a text prompt."""
    echo: bool = False
    """True if the answer begins with its prompt."""
    prompt_only: bool = False
    """True to return no generated token. (The engine always samples one; it is dropped.)"""

    session: str = ""
    """Body's hint which requests belong together, `prompt_cache_key` or `user`; a digest if it is long."""
    priority: int | None = None
    """Requested priority; None uses that of the API key."""
    timeout_seconds: float | None = None
    """Longest time from the request's arrival to its last byte."""

    n: int = 1
    """Choices of each prompt."""
    best_of: int = 1
    """Sequences of each prompt, at least `n`; the `n` most probable become choices."""

    @property
    def logprobs(self) -> bool:
        """True if log probabilities are requested."""
        return self.sampling.logprobs is not None

    def split_sequences(self) -> list[GenerationRequest]:
        """Return one request per sequence, grouped by prompt, each with a seed of its own.

        The first of each prompt has the request's seed, so that it answers as it would alone.
        """
        if self.best_of == 1 and len(self.prompts) <= 1:
            return [self]
        sampling = self.sampling
        if self.best_of > self.n and sampling.logprobs is None:  # they rank the sequences
            sampling = replace(sampling, logprobs=0)
        requests: list[GenerationRequest] = []
        for prompt in self.prompts or (self.prompt,):
            requests += [
                replace(self, prompt=prompt, prompts=(), sampling=sampling_of_sequence(sampling, index))
                for index in range(self.best_of)
            ]
        return requests


def sampling_of_sequence(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the sampling of a prompt's sequence at `index`; without a request seed, none has one.

    Only the first reports on the prompt, which makes it run without the prefix cache.
    """
    if index == 0:
        return sampling
    seed = None if sampling.seed is None else (sampling.seed + index * SEED_STEP) % 2**64
    return replace(sampling, seed=seed, prompt_logprobs=None)
